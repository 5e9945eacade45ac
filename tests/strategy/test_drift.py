"""Replicas of one process that have drifted apart are told after the epoch, and made equal."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_het import HeterogeneousStrategy
from keras_het.strategy.drift import DriftWatch, digest

X = np.random.default_rng(3).normal(size=(24, 5)).astype("float32")
EPOCHS = 3


def make_model(strategy):
    keras.utils.set_random_seed(4)
    layers = keras.layers
    with strategy.scope():
        normal = layers.BatchNormalization(name="normal")
        hidden = [layers.Dense(6, name="hidden"), normal, layers.Dropout(0.2)]
        hidden = [keras.Input((5,)), *hidden, layers.Dense(1, name="last")]
        model = keras.Sequential(hidden, name="model")
        model.compile(keras.optimizers.Adam(0.01, name="adam"), "mse", metrics=["mae"])
    return model


def copies(model, variable):
    local = model.distribute_strategy.experimental_local_results(variable.value)
    return [np.asarray(copy) for copy in local]


def differing(model):
    held = [*model.weights, *model.optimizer.variables]
    return [v.path for v in held if len({copy.tobytes() for copy in copies(model, v)}) > 1]


def changing(model, find, replica, size):
    """A callback that changes a variable on one replica, before the first epoch ends."""

    def change(epoch, logs):
        if epoch == 0:
            variable = find(model)
            local = model.distribute_strategy.experimental_local_results(variable.value)
            local[replica].assign_add(tf.cast(tf.fill(variable.shape, size), variable.dtype))

    return keras.callbacks.LambdaCallback(on_epoch_end=change)


def told(model, caplog, callbacks=()):
    caplog.clear()
    options = {"epochs": EPOCHS, "verbose": 0, "callbacks": list(callbacks)}
    with caplog.at_level(logging.WARNING, "keras_het"):
        model.fit(X, X[:, :1], batch_size=8, **options)
    return [each for each in caplog.messages if each.startswith("Replicas that must")]


@pytest.mark.full
@pytest.mark.parametrize("number", [2, 3])
def test_equal_replicas_are_not_reported(logical_devices, caplog, number):
    model = make_model(HeterogeneousStrategy(logical_devices[:number], list(range(1, number + 1))))
    assert told(model, caplog) == [] and differing(model) == []


FOUND = {
    "weight": (lambda model: model.get_layer("last").kernel, "model/last/kernel"),
    "statistics": (lambda model: model.get_layer("normal").moving_mean, "model/normal/moving_mean"),
    "optimizer": (lambda model: model.optimizer.variables[3], "adam/model_hidden_kernel_velocity"),
    "whole number": (lambda model: model.optimizer.iterations, "adam/iteration"),
}


@pytest.mark.full
@pytest.mark.parametrize("kind", FOUND)
def test_the_variable_that_differs_most_is_named_once(logical_devices, caplog, kind):
    find, name = FOUND[kind]
    model = make_model(HeterogeneousStrategy(logical_devices[:3]))
    (message,) = told(model, caplog, [changing(model, find, replica=2, size=7)])
    assert f"after epoch 1: {name} differs most, by " in message
    assert "between replica 2 (worker 0) and replica 0; 1 of 22 variables" in message
    # the next step makes one value of moving statistics
    assert len(told(model, caplog)) == (kind != "statistics")


def test_a_single_bit_is_reported_and_copied(logical_devices, caplog):
    model = make_model(HeterogeneousStrategy(logical_devices[:2], on_drift="copy"))
    kernel = model.get_layer("hidden").kernel
    size = 2 * float(np.spacing(np.abs(kernel.numpy()).max()))
    (message,) = told(model, caplog, [changing(model, lambda _: kernel, 1, size)])
    assert "hidden/kernel differs most, by " in message and "e-07 of its largest" in message
    assert differing(model) == []


@pytest.mark.full
def test_nothing_is_compared_where_nobody_wants_it(logical_devices, caplog):
    model = make_model(HeterogeneousStrategy(logical_devices[:2], on_drift="ignore"))
    assert told(model, caplog, [changing(model, FOUND["weight"][0], 1, 0.5)]) == []
    assert "model/last/kernel" in differing(model)


class Apart(keras.Model):
    """Keeps the latest inputs' mean of each replica, of which a warning of the step tells."""

    def build(self, shape):
        self.dense = keras.layers.Dense(1)
        self.dense.build(shape)
        self.seen = self.add_weight(shape=(), trainable=False, name="seen")

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        self.dense.bias.assign(tf.reduce_mean(data[0])[None])
        return super().train_step(data)


@pytest.mark.full
def test_what_a_step_leaves_apart_is_not_reported_again(logical_devices, caplog):
    strategy = HeterogeneousStrategy(logical_devices[:2])
    with strategy.scope():
        model = Apart()
        model.build((None, 5))
        model.compile("sgd", "mse")
    assert told(model, caplog) == []
    assert "keeps its own value" in caplog.text


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "int64", "uint8", "bool"])
@pytest.mark.parametrize("shape", [(), (3, 7), (2**14 + 1,), (2**19 + 5,)], ids=str)
def test_each_bit_counts_wherever_it_is(dtype, shape):
    value = np.random.default_rng(1).integers(0, 2, shape)
    variable = tf.Variable(tf.cast(value, dtype))
    first = digest([variable])
    for place in {0, value.size // 2, value.size - 1}:
        changed = value.reshape(-1).copy()
        changed[place] = 1 - changed[place]
        assert digest([tf.Variable(tf.cast(changed.reshape(shape), dtype))]) != first
    assert digest([tf.Variable(tf.cast(value, dtype))]) == first and len(first) == 8


def test_values_that_change_places_have_another_digest():
    one, other = tf.Variable([1.0, 2.0, 3.0]), tf.Variable([2.0, 1.0, 3.0])
    assert digest([one]) != digest([other]) and digest([one, other]) != digest([other, one])


@pytest.mark.full
def test_a_single_replica_is_compared_with_nothing(logical_devices, monkeypatch):
    monkeypatch.setattr(DriftWatch, "on_epoch_end", lambda *_: pytest.fail("compared"))
    make_model(HeterogeneousStrategy(logical_devices[:1])).fit(X, X[:, :1], verbose=0)
