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
        (["mse", "mae"], True),
        (["mse", own_loss], False),
    ],
)
def test_a_mean_over_samples_is_known(loss: Any, expected: bool) -> None:
    losses = loss if isinstance(loss, list) else [loss]
    x = keras.Input((3,))
    model = keras.Model(x, [keras.layers.Dense(2)(x) for _ in losses])
    model.compile("sgd", losses)
    model.train_on_batch(np.ones((4, 3)), [np.ones((4, 2))] * len(losses))
    assert is_mean_over_samples(model) == expected
