"""What pages with the comment `given: model` take as given: two devices, a model and its data."""

import keras
import numpy as np
import tensorflow as tf

import keras_het

__all__ = ["dataset", "keras", "keras_het", "model", "np", "prepare", "strategy", "tf", "x", "y"]

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)
strategy = keras_het.HeterogeneousStrategy()
keras.utils.set_random_seed(0)
x = np.random.normal(size=(72, 4)).astype("float32")
y = x.sum(axis=1, keepdims=True)
dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=0).batch(24)
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")


def prepare(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    return 2.0 * x, y
