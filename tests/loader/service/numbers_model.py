"""Tells by a metric which numbers of a data service a model was given."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf


def pairs_of_numbers(data: Any) -> tf.data.Dataset:
    """The numbers 0 to 63 in batches of 8, through a service: each is feature and label."""
    numbers = tf.data.Dataset.range(64).map(lambda number: tf.cast(number, tf.float32)[None])
    return data.distribute(numbers.batch(8), "train").map(lambda x: (x, x))


def model_of_zeros() -> keras.Model:
    """Always gives 0 and does not learn: the metric "seen" is the mean square of the labels."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    metric = keras.metrics.MeanSquaredError(name="seen")
    model.compile(keras.optimizers.SGD(0.0), "mse", metrics=[metric])
    model.layers[0].kernel.assign([[0.0]])
    return model
