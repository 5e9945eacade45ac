"""What `LocalTraining` counts, and when it waits: several steps in an execution, other data."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest

import keras_het
from keras_het.callbacks import LocalTraining
from keras_het.strategy.local_training import LocalSteps

SAMPLES, BATCH = 24, 4


class Exchange:
    """Notes steps and waits."""

    def __init__(self):
        self.steps, self.waited_after = 0, []

    def steps_done(self, steps, samples):
        self.steps += steps

    def wait(self):
        self.waited_after.append(self.steps)


def ends_of_executions(num_steps, each):
    return [first + each - 1 for first in range(0, num_steps, each)]


@pytest.mark.parametrize("each", [1, 4, 7, 40])
def test_the_last_execution_may_be_shorter(each):
    callback = LocalTraining("diloco")
    callback.set_params({"steps": 30})
    callback._exchange = Exchange()
    callback._steps = SimpleNamespace(check_step=lambda: None, take_samples=lambda: 1)
    for batch in ends_of_executions(30, each):
        callback.on_train_batch_end(batch)
    assert callback._exchange.steps == 30
    assert callback._exchange.waited_after == [30]


def test_without_a_known_end_every_step_may_be_the_last():
    callback = LocalTraining("diloco")
    callback.set_params({"steps": None})
    callback._exchange = Exchange()
    callback._steps = SimpleNamespace(check_step=lambda: None, take_samples=lambda: 1)
    for batch in range(3):
        callback.on_train_batch_end(batch)
    assert callback._exchange.waited_after == [1, 2, 3]


def test_what_callbacks_predict_does_not_count(cpu_devices):
    strategy = keras_het.HeterogeneousStrategy(cpu_devices[:2])
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.ones((SAMPLES, 3), np.float32)
    counted = []

    class Trains(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.local = LocalSteps(model, strategy)
            self.local.enter()

        def on_train_batch_begin(self, batch, logs=None):
            self.local.expect_step()
            model.predict(x, verbose=0)

        def on_train_batch_end(self, batch, logs=None):
            model.predict(x, verbose=0)
            counted.append(self.local.take_samples())

    model.fit(x, x[:, :1], batch_size=BATCH, verbose=0, callbacks=[Trains()])
    assert counted == [BATCH] * (SAMPLES // BATCH)
