"""Telemetry in a training that continues from a backup with another number of devices."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_het
from keras_het.callbacks import BackupAndRestore, BatchBalancer, Telemetry
from keras_het.telemetry.event_log import read_log

STEPS = 12


def train(folder, devices, ends_after=None):
    """Train with Telemetry before the callback that restores; end as a machine without power."""

    class Ends(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch + 1 == ends_after:
                raise InterruptedError

    strategy = keras_het.HeterogeneousStrategy(list(devices))
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    data = tf.data.Dataset.from_tensors((tf.ones([2]), tf.ones([1]))).repeat(8 * STEPS).batch(8)
    backup = BackupAndRestore(folder / "backup", save_freq=1)
    callbacks = [Telemetry(folder), BatchBalancer("even"), backup, Ends()]
    model.fit(data, verbose=0, callbacks=callbacks)


def test_steps_continue_and_the_restart_is_marked(logical_devices, tmp_path):
    with pytest.raises(InterruptedError):
        train(tmp_path, logical_devices[:3], ends_after=8)
    train(tmp_path, logical_devices[1:3])
    (run,) = read_log(tmp_path)
    recording = run.recording
    # a step is known with the next one
    assert recording.steps.tolist() == list(range(11))
    names = [device.name for device in recording.devices]
    assert names == ["worker 0 CPU 0", "worker 0 CPU 1", "worker 0 CPU 0 (until step 6)"]
    assert recording.shares[0].tolist() == [3, 2, 3]
    assert recording.shares[-1][:2].tolist() == [4, 4] and np.isnan(recording.shares[-1][2])
    assert [(each.step, each.kind) for each in recording.changes] == [
        (0, "shares"),
        (7, "restart"),
        (7, "shares"),
    ]
    assert recording.changes[1].text == "restart with 1 worker, 2 replicas: 1 gone"
