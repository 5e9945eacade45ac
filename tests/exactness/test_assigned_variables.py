"""Variables that a step of one's own sets outside of the optimizer: combined, equal, or named."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from devices import XLA
from equivalence import (
    IS_KERAS_3_16,
    Trial,
    arrays,
    assert_all_close,
    assert_equivalent,
    batches,
    said,
    three_replicas,
)
from test_exact_own_steps import Base, compiled

import keras_het

ops = keras.ops
OUTSIDE = []


class Own(keras.Model):
    """Calls `update(model, x)` in its train step, after the optimizer."""

    def __init__(self, update, aggregation="NONE", optimizer=None):
        super().__init__()
        self.hidden, self.head = keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)
        self.update = update
        kind = tf.VariableAggregation[aggregation]
        self.kept = tf.Variable(0.0, trainable=False, aggregation=kind, name="kept")
        self.row = tf.Variable(tf.zeros([5]), trainable=False, name="row")
        self.other = tf.Variable(0.0, trainable=False, name="other")
        self.state = self.add_weight((), "zeros", trainable=False, name="state")
        self.build((None, 5))
        self.compile(optimizer or keras.optimizers.SGD(0.1))

    def build(self, shape):
        self.hidden.build(shape)
        self.head.build((None, 3))
        self.built = True

    def call(self, x):
        return self.head(self.hidden(x))

    def gradients(self, x, y):
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(self(x) - y))
        return loss, tape.gradient(loss, self.trainable_variables)

    def train_step(self, data):
        x, y = data
        loss, gradients = self.gradients(x, y)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.update(self, x)
        return {"loss": loss}


def in_branch(model, x):
    tf.cond(ops.sum(x) > 1e9, lambda: model.kept.assign(0.0), lambda: model.kept.assign_add(1.0))


def in_loop(model, x):
    for _ in tf.range(tf.shape(x)[0]):
        model.kept.assign_add(1.0)


@tf.function
def in_function(model, x):
    model.kept.assign(ops.mean(x))


def one_after_the_other(model, x):
    model.kept.assign(ops.mean(x))
    model.other.assign(model.kept * 2.0)


def rate(model, x):
    model.optimizer.learning_rate.assign(1e-3 * ops.mean(ops.abs(x)))


def outside(model, x):
    OUTSIDE[0].assign_add(1.0)


NAMED = {
    "assign": (lambda m, x: m.kept.assign(ops.mean(x)), ["'kept:0' (Own.kept)"]),
    "add": (lambda m, x: m.kept.assign_add(ops.cast(ops.shape(x)[0], "float32")), ["'kept:0'"]),
    "sub": (lambda m, x: m.kept.assign_sub(ops.sum(x)), ["'kept:0'"]),
    "slice": (lambda m, x: m.row[1].assign(ops.mean(x)), ["'row:0'"]),
    "scatter": (
        lambda m, x: m.row.scatter_add(tf.IndexedSlices([ops.max(x)], [2])),
        ["'row:0' (Own.row)"],
    ),
    "branch": (in_branch, ["'kept:0'"]),
    "loop": (tf.autograph.to_graph(in_loop), ["'kept:0'"]),
    "function": (in_function, ["'kept:0'"]),
    "chain": (one_after_the_other, ["'kept:0'", "'other:0'"]),
    "Keras": (lambda m, x: OUTSIDE[1].assign(ops.mean(x)), ["elsewhere"]),
    "outside": (outside, ["'outside:0'"]),
    "rate": (rate, ["learning_rate"]),
    "weight": (lambda m, x: m.head.bias.assign_add([1e-3 * ops.mean(x)]), ["bias"]),
    "value": (lambda m, x: m.head.bias.value.assign([1e-3 * ops.mean(x)]), ["bias"]),
}


def trained(update, eagerly=False, **options):
    strategy = three_replicas()
    strategy.set_share_weights((4, 0, 1))
    OUTSIDE[:] = [tf.Variable(0.0, trainable=False, name="outside")]
    with strategy.scope():
        OUTSIDE.append(keras.Variable(0.0, trainable=False, name="elsewhere"))
        model = Own(update, **options)
    model.run_eagerly = eagerly
    model.fit(*arrays(10), batch_size=5, verbose=0, epochs=2, shuffle=False)
    return strategy, model


@pytest.mark.quick("chain")
@pytest.mark.parametrize("name", NAMED)
def test_a_variable_that_each_replica_sets_from_its_samples_is_named(name, caplog):
    update, parts = NAMED[name]
    trained(update)
    # What trains apart drifts apart, which is said after the first epoch.
    message, *drift = said(caplog)
    assert all("Replicas that must be equal differ after epoch 1" in line for line in drift)
    for part in [*parts, "keras_het.reduce_over_replicas", "self.add_weight"]:
        assert part in message


@pytest.mark.full
@pytest.mark.parametrize("name", ["assign", "slice", "weight"])
def test_eager_steps_too(name, caplog):
    update, parts = NAMED[name]
    trained(update, eagerly=True)
    (message,) = said(caplog)
    assert parts[0] in message


def from_a_counter(model, x):
    model.kept.assign_add(1.0)
    model.state.assign(model.kept * 0.5)


def reduced(model, x):
    model.kept.assign(keras_het.reduce_over_replicas(ops.mean(x)))
    rows = keras_het.reduce_over_replicas({"rows": ops.shape(x)[0], "none": None}, "sum")
    model.other.assign_add(ops.cast(rows["rows"], "float32"))
    model.row.scatter_add(tf.IndexedSlices([model.kept], [1]))


QUIET = {
    "steps": lambda m, x: m.kept.assign_add(1.0),
    "clipped": lambda m, x: m.head.kernel.assign(ops.clip(m.head.kernel, -0.5, 0.5)),
    "average": lambda m, x: m.row.assign(0.9 * m.row + ops.sum(m.head.bias)),
    "rate": lambda m, x: m.optimizer.learning_rate.assign(0.9 * m.optimizer.learning_rate),
    "counter": from_a_counter,
    "reduced": reduced,
}


@pytest.mark.quick("reduced")
@pytest.mark.parametrize("name", QUIET)
def test_what_replicas_agree_on_is_not_named(name, caplog):
    strategy, model = trained(QUIET[name])
    assert not said(caplog)
    for variable in (model.kept, model.row, model.other):
        first, *others = map(np.array, strategy.experimental_local_results(variable))
        for other in others:
            np.testing.assert_array_equal(first, other)
    if name == "reduced":
        np.testing.assert_allclose(np.array(model.kept), arrays(10)[0][5:].mean(), rtol=1e-5)
        assert np.array(model.other) == 20.0


@pytest.mark.full
@pytest.mark.parametrize(("aggregation", "right"), [("SUM", 40.0), ("MEAN", 0.0)])
def test_the_aggregation_of_a_variable_counts_samples(aggregation, right, caplog):
    def update(model, x):
        rows = ops.cast(ops.shape(x)[0], "float32")
        model.kept.assign_add(2.0 * rows if aggregation == "SUM" else ops.mean(x))

    strategy, model = trained(update, aggregation=aggregation)
    right = right or 2 * sum(part.mean() for part in np.split(arrays(10)[0], 2))
    for value in strategy.experimental_local_results(model.kept):
        np.testing.assert_allclose(np.array(value), right, rtol=1e-5)
    assert not said(caplog)


@pytest.mark.full
def test_a_variable_of_a_layer_or_loss_set_in_predict_is_named(caplog):
    class Layer(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.seen = tf.Variable(0.0, trainable=False, name="seen")

        def call(self, x):
            self.seen.assign(ops.mean(x))
            return x

    with three_replicas().scope():
        model = keras.Sequential([keras.Input((5,)), Layer(), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.predict(arrays(8)[0], batch_size=4, verbose=0)
    model.evaluate(*arrays(8), batch_size=4, verbose=0)
    (message,) = said(caplog)
    assert "'seen:0' (Layer.seen)" in message


class Sam(Own):
    """Sharpness-aware minimization: the gradient at weights moved by that of the whole batch."""

    def __init__(self, reduce):
        super().__init__(None)
        self.reduce = reduce

    def train_step(self, data):
        x, y = data
        weights = self.trainable_variables
        loss, gradients = self.gradients(x, y)
        gradients = self.reduce(gradients)
        norm = tf.linalg.global_norm(gradients)
        moves = [0.05 * gradient / norm for gradient in gradients]
        for weight, move in zip(weights, moves, strict=True):
            weight.assign_add(move)
        _, gradients = self.gradients(x, y)
        for weight, move in zip(weights, moves, strict=True):
            weight.assign_sub(move)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return {"loss": loss}


def trained_by_sam(scope, reduce=keras_het.reduce_over_replicas):
    keras.utils.set_random_seed(3)
    with scope():
        model = Sam(reduce)
    x, y = (each.astype("float64") for each in arrays(22))
    losses = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history["loss"]
    return [*map(np.array, model.weights), np.array(losses)]


@pytest.mark.full
def test_sharpness_aware_minimization_is_exact_with_the_sum_over_replicas(double_precision, caplog):
    expected = trained_by_sam(contextlib.nullcontext)
    strategy = three_replicas()
    for shares in [(4, 0, 1), (0, 3, 5)]:
        strategy.set_share_weights(shares)
        assert_all_close(trained_by_sam(strategy.scope), expected, rtol=1e-9, atol=1e-11)
    assert not said(caplog)


class Penalty(keras.layers.Layer):
    def call(self, x):
        self.add_loss(0.1 * ops.mean(ops.square(x)))
        return x


def normalized(scope, of_unknown_length):
    keras.utils.set_random_seed(3)
    with scope():
        inner = keras.layers.Dense(4, "tanh", kernel_regularizer="l2", activity_regularizer="l2")
        layers = [keras.layers.SpectralNormalization(inner), Penalty(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((5,)), *layers])
        model.compile(keras.optimizers.Adam(0.01), "mse")
    data = tf.data.Dataset.from_tensor_slices(tuple(a.astype("float64") for a in arrays(22)))
    batches = data.batch(8)
    if of_unknown_length:
        batches = batches.filter(lambda x, y: True)
    history = model.fit(batches, validation_data=batches, epochs=2, verbose=0).history
    steps = int(np.array(model.optimizer.iterations.value))
    return steps, [*map(np.array, model.weights), *history.values()]


@pytest.mark.full
def test_the_end_of_data_of_unknown_length_is_no_step(double_precision, caplog):
    """On one device Keras does then what needs no data, such as normalizing a weight."""
    steps, expected = normalized(contextlib.nullcontext, False)
    assert steps == 6
    # Neither Keras 3.16 nor XLA begins a further step on one device.
    assert (normalized(contextlib.nullcontext, True)[0] > steps) != (IS_KERAS_3_16 or XLA)
    strategy = three_replicas()
    for shares in [(1, 0, 0), (3, 0, 1)]:
        strategy.set_share_weights(shares)
        found_steps, found = normalized(strategy.scope, True)
        assert found_steps == steps
        assert_all_close(found, expected, rtol=1e-9, atol=1e-11)
    assert not said(caplog)


@pytest.mark.full
def test_weights_that_each_replica_moves_by_its_own_gradient_are_named(caplog):
    strategy = three_replicas()
    strategy.set_share_weights((4, 0, 1))
    trained_by_sam(strategy.scope, reduce=lambda gradients: gradients)
    (message,) = said(caplog)
    for part in ("kernel", "bias", "SAM", "reduce_over_replicas"):
        assert part in message


def test_the_sum_over_replicas_outside_of_a_step():
    assert keras_het.reduce_over_replicas([1.0, None]) == [1.0, None]
    with pytest.raises(ValueError, match="Received: 'max'"):
        keras_het.reduce_over_replicas(1.0, "max")
    with pytest.raises(ValueError, match="Received: a call in a function given to"):
        three_replicas().run(lambda: keras_het.reduce_over_replicas(tf.constant(1.0)))


class SmoothedGradients(Base):
    """Gradients that are kept, and applied from the variables."""

    as_keras_variables = True

    def build(self, shape):
        super().build(shape)
        self.kept = [
            self.add_weight(shape=weight.shape, initializer="zeros", trainable=False)
            for weight in self.trainable_variables
        ]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        for kept, gradient in zip(self.kept, gradients, strict=True):
            kept.assign(0.5 * kept + 0.5 * gradient)
        if self.as_keras_variables:
            self.optimizer.apply_gradients(zip(self.kept, self.trainable_variables, strict=True))
        else:
            self.optimizer.apply([kept.value for kept in self.kept], self.trainable_variables)
        return {"loss": loss}


@pytest.mark.full
@pytest.mark.parametrize("as_keras_variables", [True, False])
def test_gradients_in_variables(monkeypatch, as_keras_variables):
    monkeypatch.setattr(SmoothedGradients, "as_keras_variables", as_keras_variables)
    trial = Trial(compiled(SmoothedGradients, metrics=None), evaluate=False)
    assert_equivalent(trial, [(4, 2, 1)])


class OwnVariables(SmoothedGradients):
    """Gradients in variables of which Keras knows nothing."""

    def build(self, shape):
        super().build(shape)
        self.kept = [tf.Variable(tf.zeros(weight.shape)) for weight in self.trainable_variables]


class Conditional(SmoothedGradients):
    """An update in a branch."""

    def train_step(self, data):
        def update():
            SmoothedGradients.train_step(self, data)
            return True

        tf.cond(tf.reduce_sum(data[0]) < 1e9, update, lambda: False)
        return {}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (OwnVariables, r"must be in variables that Keras knows.*self\.add_weight"),
        (Conditional, r"within tf\.cond.*3 replicas of a process.*gradient_accumulation_steps"),
    ],
)
def test_updates_that_cannot_be_added_up(model, message):
    with three_replicas().scope():
        built = compiled(model, metrics=None)()
    with pytest.raises(ValueError, match=message):
        built.fit(batches(), verbose=0)
