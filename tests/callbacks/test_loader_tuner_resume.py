"""A training that LoaderTuner changes is interrupted within an epoch, and goes on from a backup."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from interruption import Interruption
from loader_training import Patient, build, done, moving

import keras_het
from keras_het.callbacks import BackupAndRestore
from keras_het.loader import Knobs, pipeline

KNOBS = Knobs(2, 2, 2)


def trained(devices, data, callbacks):
    """Weights and optimizer state after three epochs."""
    keras.utils.set_random_seed(3)
    strategy = keras_het.HeterogeneousStrategy(list(devices[:2]), shares=[3, 1])
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
    model.fit(data, epochs=3, verbose=0, callbacks=callbacks)
    return [np.array(variable) for variable in (*model.weights, *model.optimizer.variables)]


@pytest.mark.quick("builder-in the second epoch, tuner first")
@pytest.mark.parametrize(
    ("step", "tuner_is_first"),
    [
        pytest.param(20, True, id="in the second epoch, tuner first"),
        pytest.param(31, False, id="in the third, backup first"),
    ],
)
@pytest.mark.parametrize("is_builder", [True, False], ids=["builder", "data set"])
def test_a_tuned_training_goes_on_where_it_was(
    logical_devices, tmp_path, is_builder, step, tuner_is_first
):
    def data():
        tf.random.set_seed(5)
        return pipeline(build, KNOBS) if is_builder else build(KNOBS)

    expected = trained(logical_devices, data(), [])

    def callbacks():
        tuner = moving()
        both = [tuner, BackupAndRestore(str(tmp_path / "backup"), save_freq=2)]
        return tuner, [*both[:: 1 if tuner_is_first else -1], Patient(tuner)]

    first, with_backup = callbacks()
    with pytest.raises(InterruptedError):
        trained(logical_devices, data(), [*with_backup, Interruption(step)])
    assert done(first)
    second, with_backup = callbacks()
    found = trained(logical_devices, data(), with_backup)
    assert done(second)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
