"""What `LocalTraining` counts, and when it waits: several steps in an execution, other data."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from small_training import BATCH, SAMPLES, make_model

import keras_het
from keras_het.callbacks import LocalTraining, local_training
from keras_het.fit.session import FitSession
from keras_het.local_training import LocalSteps, PeriodicExchange
from keras_het.rules import DiLoCo


class Exchange:
    def __init__(self):
        self.steps, self.waited_after = 0, []

    def steps_done(self, steps, samples):
        self.steps += steps

    def wait(self):
        self.waited_after.append(self.steps)


X = np.ones((SAMPLES, 3), np.float32)


@pytest.fixture
def strategy(logical_devices):
    return keras_het.HeterogeneousStrategy(logical_devices[:1])


def train(model, *callbacks):
    model.fit(X, X[:, :1], batch_size=BATCH, verbose=0, callbacks=callbacks)


class TrainsLocally(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.local = LocalSteps(FitSession.of(self.model), self.model.distribute_strategy)


@pytest.mark.parametrize(
    ("known", "each", "waits"),
    [*((30, each, [30]) for each in (1, 4, 7, 40)), (None, 1, list(range(1, 31)))],
)
def test_the_last_execution_may_be_shorter_and_any_without_a_known_end(known, each, waits):
    callback = LocalTraining("diloco")
    callback.set_params({"steps": known})
    callback._exchange = Exchange()
    callback._steps = SimpleNamespace(take_samples=lambda: 1)
    for first in range(0, 30, each):
        callback.on_train_batch_begin(first)
        callback.on_train_batch_end(first + each - 1)
    assert callback._exchange.steps == 30
    assert callback._exchange.waited_after == waits


@pytest.mark.full
def test_what_callbacks_predict_does_not_count(logical_devices):
    model, counted = make_model(keras_het.HeterogeneousStrategy(logical_devices[:2])), []

    class Trains(TrainsLocally):
        def on_train_batch_begin(self, batch, logs=None):
            model.predict(X, verbose=0)

        def on_train_batch_end(self, batch, logs=None):
            model.predict(X, verbose=0)
            counted.append(self.local.take_samples())

    train(model, Trains())
    assert counted == [BATCH] * (SAMPLES // BATCH)


@pytest.fixture
def three_workers(strategy, monkeypatch):
    """A strategy whose sums are those of three workers, all like this one, once there are three."""
    strategy.count = tf.Variable(1.0)
    sums = lambda vector: strategy.count * vector  # noqa: E731
    monkeypatch.setattr(strategy.extended, "sum_over_workers", sums)
    return strategy


@pytest.mark.parametrize("overlap", [0, 1])
def test_frozen_weights_keep_their_bits(three_workers, overlap):
    with three_workers.scope():
        frozen = keras.layers.Dense(100, trainable=False)
        model = keras.Sequential([keras.Input((3,)), frozen, keras.layers.Dense(1)])
    mask = np.where(np.arange(100) % 3, 0.0, -np.inf)
    frozen.bias.assign(mask)
    before = [np.array(weight) for weight in frozen.weights]
    exchange = PeriodicExchange(model, three_workers, DiLoCo(period=2, overlap=overlap))
    three_workers.count.assign(3.0)
    for _ in range(6):
        exchange.steps_done(1, 7)
    exchange.end()
    assert exchange.num_exchanges == 3
    for weight, kept in zip(frozen.weights, before, strict=True):
        np.testing.assert_array_equal(weight, kept)


def test_statistics_that_moved_become_their_mean(three_workers):
    with three_workers.scope():
        layer = keras.layers.BatchNormalization()
        model = keras.Sequential([keras.Input((3,)), layer, keras.layers.Dense(1)])
    exchange = PeriodicExchange(model, three_workers, DiLoCo(period=1))
    three_workers.count.assign(3.0)
    layer.moving_mean.assign([1e-9, 2.0, -3.0])
    exchange.steps_done(1, 7)
    np.testing.assert_allclose(layer.moving_mean, [1e-9, 2.0, -3.0], rtol=1e-6)


def test_what_was_restored_is_not_that_of_a_later_training(strategy):
    callback = LocalTraining("diloco")
    with strategy.scope():
        callback.set_model(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]))
    strategy.extended.training_state.restored = {"local_training/counts": np.array([5, 0, 0])}
    callback._end_training()
    assert strategy.extended.training_state.restored is None


def test_a_failed_training_is_in_no_later_backup(strategy):
    model = make_model(strategy)

    class Fails(TrainsLocally):
        def on_train_batch_end(self, batch, logs=None):
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        train(model, Fails())
    strategy.extended.training_state.export = dict  # of the failed training, which nobody took back
    train(model)
    assert strategy.extended.training_state.export is None


@pytest.mark.parametrize("loop", ["fit", "train_on_batch"])
def test_other_training_within_a_local_one_is_refused(strategy, loop):
    model = make_model(strategy)

    class Trains(TrainsLocally):
        def on_train_batch_end(self, batch, logs=None):
            getattr(model, loop)(X[:BATCH], X[:BATCH, :1])

    with pytest.raises(RuntimeError, match=f"Received: {loop} of the same model"):
        train(model, Trains())


@pytest.mark.parametrize(
    ("rule", "steps", "period"),
    [
        ("diloco", 20, 20),
        ("diloco", 900, 500),
        ("diloco", None, 500),
        ("sync_easgd", 20, 1),
        ({"class_name": "diloco", "config": {"overlap": 3}}, 2, 3),  # no shorter than its overlap
        ({"class_name": "diloco", "config": {"period": 30}}, 20, 30),
        (DiLoCo(period=30), 20, 30),
    ],
)
def test_the_default_period_is_no_longer_than_an_epoch(rule, steps, period):
    made = local_training._synchronous(rule, num_workers=2)
    assert local_training._fitting(made, rule, steps, epochs=3).period == period


@pytest.mark.parametrize(
    "rule", [DiLoCo(period=61), {"class_name": "diloco", "config": {"period": 61}}]
)
def test_a_period_longer_than_the_training_is_refused(rule):
    made = local_training._synchronous(rule, num_workers=2)
    with pytest.raises(ValueError, match="Received: period=61; expected: at most 60"):
        local_training._fitting(made, rule, 20, epochs=3)
