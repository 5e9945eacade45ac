"""Which losses let a micro-batch go back before the others are through."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from keras_het.strategy.pipeline.step.loss_head import is_mean_over_samples


def own_loss(y: Any, prediction: Any) -> Any:
    return keras.ops.mean(keras.ops.square(y - prediction))


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ("mse", True),
        (keras.losses.MeanAbsoluteError(), True),
        (keras.losses.MeanSquaredError(reduction="sum"), False),
        (keras.losses.Dice(), False),
        (own_loss, False),
    ],
)
def test_a_mean_over_samples_is_known(loss: Any, expected: bool) -> None:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile("sgd", loss)
    model.train_on_batch(np.ones((4, 3)), np.ones((4, 2)))
    assert is_mean_over_samples(model) == expected


def test_all_losses_must_be_means() -> None:
    x = keras.Input((3,))
    outputs = [keras.layers.Dense(2, name=name)(x) for name in "ab"]
    model = keras.Model(x, outputs)
    model.compile("sgd", ["mse", own_loss])
    model.train_on_batch(np.ones((4, 3)), [np.ones((4, 2))] * 2)
    assert not is_mean_over_samples(model)
