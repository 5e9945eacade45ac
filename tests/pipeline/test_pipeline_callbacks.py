"""Callbacks of keras_het that work with a model in stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from pipeline_training import DEVICES

import keras_het
from keras_het import callbacks

L = keras.layers


def model_under(strategy: keras_het.PipelineStrategy) -> keras.Model:
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential([keras.Input([4]), L.Dense(3, name="one"), L.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse", jit_compile=False)
    return model


def fit(model: keras.Model, **options: Any) -> Any:
    random = np.random.default_rng(0)
    x, y = random.normal(size=(24, 4)), random.normal(size=(24, 1))
    return model.fit(x, y, batch_size=4, verbose=0, shuffle=False, **options)


@pytest.fixture
def strategy(logical_devices: Any) -> keras_het.PipelineStrategy:
    return keras_het.PipelineStrategy(["one"], 2, DEVICES)


@pytest.mark.full
def test_the_loader_is_tuned(strategy: keras_het.PipelineStrategy) -> None:
    fit(model_under(strategy), callbacks=[callbacks.LoaderTuner()])


class Stops(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 4:
            raise InterruptedError


@pytest.mark.full
def test_training_goes_on_within_an_epoch(
    strategy: keras_het.PipelineStrategy, tmp_path: Path
) -> None:
    model = model_under(strategy)
    fit(model, epochs=2)
    backup = callbacks.BackupAndRestore(tmp_path, save_freq=3)
    with pytest.raises(InterruptedError):
        fit(model_under(strategy), epochs=2, callbacks=[backup, Stops()])
    other = keras_het.PipelineStrategy(num_micro_batches=2, devices=DEVICES[:2])
    resumed = model_under(other)
    fit(resumed, epochs=2, callbacks=[callbacks.BackupAndRestore(tmp_path, save_freq=3)])
    for one, two in zip(model.get_weights(), resumed.get_weights(), strict=True):
        np.testing.assert_allclose(two, one, rtol=1e-5)
