"""Losses of layers stay with their replica where replicas take turns in the middle of a step.

Replicas of one process are threads that switch at each collective, and share the model's layers.
Each model here has a loss of a layer and a collective between its `add_loss` and its end.
"""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import (
    Trial,
    arrays,
    assert_equivalent,
    three_replicas,
)

layers, sgd = keras.layers, functools.partial(keras.optimizers.SGD, 0.05, momentum=0.5)
penalty = functools.partial(keras.regularizers.L2, 0.5)


def synchronized():
    return layers.BatchNormalization(synchronized=True, epsilon=0.1)


def compiled(model, loss="mse", **options):
    model.compile(sgd(), loss, **options)
    return model


def dense(**options):
    return layers.Dense(4, "tanh", activity_regularizer=penalty(), **options)


class Adds(layers.Layer):
    """Adds losses on both sides of statistics that are summed over replicas."""

    def __init__(self):
        super().__init__()
        self.normalization = synchronized()

    def call(self, inputs, training=False):
        self.add_loss(0.5 * keras.ops.mean(keras.ops.square(inputs)))
        outputs = self.normalization(inputs, training=training)
        self.add_loss(0.2 * keras.ops.sum(keras.ops.square(outputs), axis=1))
        self.add_loss(0.1 * keras.ops.mean(keras.ops.abs(outputs)))
        return outputs


def behind_statistics():
    return keras.Sequential([keras.Input((5,)), dense(), synchronized(), layers.Dense(1)])


def own_layer():
    return keras.Sequential([keras.Input((5,)), dense(), Adds(), layers.Dense(1)])


def used_twice():
    """A layer, and a model that is a layer, each called twice in one step."""
    inner = keras.Sequential([keras.Input((4,)), dense(), synchronized()])
    inputs = keras.Input((5,))
    shared = dense()
    hidden = inner(shared(inputs))
    return keras.Model(inputs, layers.Dense(1)(inner(hidden)))


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.first, self.adds, self.last = dense(), Adds(), layers.Dense(1)

    def call(self, inputs, training=False):
        self.add_loss(0.3 * keras.ops.mean(inputs * self.first(inputs)[:, :1]))
        return self.last(self.adds(self.first(inputs), training=training))


def subclassed():
    model = Subclassed()
    model(np.zeros((2, 5), "float32"))
    return model


class OwnStep(keras.Sequential):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(keras.ops.square(self(x, training=True) - y)) + sum(self.losses)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


def own_step():
    return OwnStep([keras.Input((5,)), dense(), synchronized(), layers.Dense(1)])


MODELS = {each.__name__: each for each in (behind_statistics, own_layer, used_twice, subclassed)}


@pytest.mark.quick("used_twice")
@pytest.mark.parametrize("name", MODELS)
def test_behind_synchronized_statistics(name):
    assert_equivalent(Trial(lambda: compiled(MODELS[name](), metrics=["mae"])))


@pytest.mark.full
@pytest.mark.parametrize("options", [{"run_eagerly": True}, {"steps_per_execution": 3}])
def test_other_ways_to_run(options):
    # eager replicas must know the number of samples, which the last batch has fewer of
    assert_equivalent(Trial(lambda: compiled(own_layer(), **options)))


def test_a_step_of_ones_own():
    assert_equivalent(Trial(lambda: compiled(own_step()), evaluate=False))


@pytest.mark.full
def test_several_outputs_and_evaluation_within_the_fit():
    def build():
        inputs = keras.Input((5,))
        hidden = synchronized()(dense()(inputs))
        outputs = [layers.Dense(1, name="one")(hidden), dense(name="four")(hidden)]
        return compiled(keras.Model(inputs, outputs), ["mse", "mae"])

    def data():
        x, y = arrays()
        return tf.data.Dataset.from_tensor_slices((x, (y, np.tile(y, 4)))).batch(8)

    def fit(model, callbacks):
        options = {"epochs": 2, "verbose": 0, "callbacks": callbacks}
        return model.fit(data(), validation_data=data(), **options)

    assert_equivalent(Trial(build, data, fit=fit))


def test_layers_have_the_losses_of_before_when_the_step_is_over():
    strategy = three_replicas()
    with strategy.scope():
        model = compiled(behind_statistics())
    rows = tf.ones((6, 5))
    model(rows)
    (before,) = model.losses
    tf.function(lambda: strategy.run(model.train_step, args=((rows, rows[:, :1]),)))()
    (after,) = model.losses
    assert after is before
