"""What Keras keeps in Python stays with its replica where replicas take turns within a step.

Replicas of one process are threads that switch at each collective, and share the model's layers.
Each model here has losses of layers or masks, and a collective between their making and their use.
"""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import Trial, arrays, assert_equivalent, dense_model, three_replicas
from test_zero_share_from_the_start import OwnStep

ops, layers = keras.ops, keras.layers
sgd = functools.partial(keras.optimizers.SGD, 0.05, momentum=0.5)
penalty = functools.partial(keras.regularizers.L2, 0.5)
# masks are made, used and dropped, and drop nothing: what is random cannot be compared
BARELY = 1e-7


def synchronized():
    return layers.BatchNormalization(synchronized=True, epsilon=0.1)


class Penalized(layers.Layer):
    """Adds losses before and after a collective, and hands its mask on."""

    def __init__(self):
        super().__init__()
        self.supports_masking = True
        self.normalization = synchronized()

    def call(self, inputs, mask=None, training=False):
        self.add_loss(0.3 * ops.mean(ops.square(inputs)))
        outputs = self.normalization(inputs, mask=mask, training=training)
        self.add_loss(0.1 * ops.mean(ops.abs(outputs)))
        return outputs


class Normalized(layers.SimpleRNNCell):
    """A cell with a collective in each of its steps, between two uses of its masks."""

    def __init__(self, units, **options):
        super().__init__(units, **options)
        self.normalization = synchronized()
        self.has_same_masks = []

    def build(self, shape):
        super().build(shape)
        self.normalization.build((None, self.units))

    def call(self, inputs, states, training=False):
        makers = (self.get_dropout_mask, self.get_recurrent_dropout_mask)
        before = [make(x) for make, x in zip(makers, (inputs, states[0]), strict=True)]
        output, states = super().call(inputs, states, training=training)
        output = self.normalization(output, training=training)
        after = [make(x) for make, x in zip(makers, (inputs, states[0]), strict=True)]
        self.has_same_masks += [a is b for a, b in zip(before, after, strict=True)]
        return output, [output]


class Plan:
    """What one seed draws: each model has at least two collectives and two kinds of losses."""

    def __init__(self, seed):
        random = np.random.default_rng(500 + seed)
        self.cell = ["lstm", "gru", "normalized"][seed % 3]
        self.is_embedded = bool(random.integers(2))
        self.returns_sequences = bool(random.integers(2))
        self.adds = bool(random.integers(2))
        self.reduction = str(random.choice(["mean_with_sample_weight", "mean", "sum"]))
        self.shares = [(4, 2, 1), tuple(int(s) for s in random.permutation([0, 3, 5]))]

    def recurrent(self):
        options = {
            "dropout": BARELY,
            "recurrent_dropout": BARELY,
            "recurrent_regularizer": "l2",
        }
        more = {"activity_regularizer": "l2", "return_sequences": self.returns_sequences}
        if self.cell == "normalized":
            return layers.RNN(Normalized(3, **options), unroll=True, **more)
        return {"lstm": layers.LSTM, "gru": layers.GRU}[self.cell](3, **options, **more)

    def build(self):
        first = layers.Embedding(9, 4, mask_zero=True, embeddings_regularizer="l2")
        if not self.is_embedded:
            first = layers.Masking()
        parts = [Penalized()] if self.adds else []
        parts += [self.recurrent(), Penalized(), layers.Dense(1, activity_regularizer="l2")]
        shape = (4,) if self.is_embedded else (4, 3)
        dtype = "int32" if self.is_embedded else "float32"
        model = keras.Sequential([keras.Input(shape, dtype=dtype), first, *parts])
        loss = keras.losses.MeanSquaredError(reduction=self.reduction)
        # little, so that rounding stays small where statistics are those of few words
        model.compile(keras.optimizers.SGD(0.01), loss, weighted_metrics=["mae"])
        return model

    def data(self):
        random = np.random.default_rng(7)
        used = np.arange(4) < random.integers(1, 5, 22)[:, None]
        words = random.integers(1, 9, (22, 4)).astype("int32") * used
        values = random.normal(size=(22, 4, 3)).astype("float32") * used[..., None]
        shape = (22, 4) if self.returns_sequences else (22,)
        targets = random.normal(size=(*shape, 1)).astype("float32")
        weights = random.uniform(0.2, 2.0, shape).astype("float32")
        x = words if self.is_embedded else values
        return tf.data.Dataset.from_tensor_slices((x, targets, weights)).batch(8)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(9))
def test_several_at_once(seed):
    plan = Plan(seed)
    trial = Trial(plan.build, plan.data, predict=False)
    assert_equivalent(trial, plan.shares, rtol=1e-3, atol=1e-4)


def test_the_plans_have_every_choice():
    plans = [Plan(seed) for seed in range(9)]
    for name in ("is_embedded", "returns_sequences", "adds"):
        assert {getattr(plan, name) for plan in plans} == {True, False}
    assert {plan.reduction for plan in plans} == {"mean_with_sample_weight", "mean", "sum"}


@pytest.mark.full
def test_masks_of_dropout_stay_with_their_replica():
    strategy = three_replicas()
    strategy.set_share_weights((4, 2, 1))
    with strategy.scope():
        cell = Normalized(3, dropout=0.5, recurrent_dropout=0.5)
        model = keras.Sequential(
            [keras.Input((4, 3)), layers.RNN(cell, unroll=True), layers.Dense(1)]
        )
        model.compile("sgd", "mse")
    cell.has_same_masks.clear()
    x = np.random.default_rng(0).normal(size=(14, 4, 3)).astype("float32")
    model.fit(x, x[:, 0, :1], batch_size=7, verbose=0)
    assert cell.has_same_masks
    assert all(cell.has_same_masks)


@pytest.mark.quick("False")
@pytest.mark.parametrize("eagerly", [False, True])
def test_losses_in_a_loop_of_ones_own(eagerly):
    strategy = three_replicas()
    strategy.set_share_weights((4, 2, 1))
    with strategy.scope():
        dense = layers.Dense(4, "tanh", activity_regularizer="l2")
        middle = layers.BatchNormalization(synchronized=True)
        model = keras.Sequential([keras.Input((5,)), dense, middle, layers.Dense(1)])
    (batch,) = strategy.distribute(tf.data.Dataset.from_tensor_slices(arrays(7)).batch(7))

    def replica_step(data):
        if tf.reduce_sum(data[0]) > -1e9:  # a symbolic condition, for AutoGraph to convert
            tf.debugging.assert_greater(1, 0)
        model(data[0], training=True)
        assert len(model.losses) == 1
        return model.losses[0]

    def step():
        return strategy.run(replica_step, args=(batch,))

    found = strategy.experimental_local_results(step() if eagerly else tf.function(step)())
    rows = strategy.experimental_local_results(batch[0])
    wanted = [dense.activity_regularizer(dense(part)) / len(part) for part in rows]
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    assert len(set(np.array(found))) == 3


class Noise(layers.Layer):
    def call(self, inputs):
        return inputs + keras.random.normal(ops.shape(inputs))


@pytest.mark.full
def test_random_numbers_without_a_seed():
    strategy = three_replicas()
    strategy.set_share_weights((3, 2, 2))
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = dense_model(layers=lambda: [Noise()])
    outputs = [model.predict(np.ones((7, 5), "float32"), verbose=0) for _ in range(2)]
    assert len(np.unique(np.round(outputs, 5))) == 14
    model.fit(*arrays(14), batch_size=7, verbose=0)
    with strategy.scope():
        model.compile("sgd", "mse", run_eagerly=True)
    model.fit(*arrays(14), batch_size=7, verbose=0)


class Late(layers.Layer):
    """Makes a layer when it is built, as late as within the first step."""

    def build(self, shape):
        self.inner = layers.Dense(4)
        super().build(shape)

    def call(self, inputs):
        return self.inner(inputs)


def test_layers_made_in_a_step_have_the_policy_of_the_caller():
    strategy = three_replicas()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        with strategy.scope():
            model = keras.Sequential([Late(), layers.Dense(1)])
        model.predict(np.ones((7, 5), "float32"), verbose=0)
    finally:
        keras.config.set_dtype_policy("float32")
    assert model.layers[0].inner.compute_dtype == "float16"


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
        self.add_loss(0.5 * ops.mean(ops.square(inputs)))
        outputs = self.normalization(inputs, training=training)
        self.add_loss(0.2 * ops.sum(ops.square(outputs), axis=1))
        self.add_loss(0.1 * ops.mean(ops.abs(outputs)))
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
        self.add_loss(0.3 * ops.mean(inputs * self.first(inputs)[:, :1]))
        return self.last(self.adds(self.first(inputs), training=training))


def subclassed():
    model = Subclassed()
    model(np.zeros((2, 5), "float32"))
    return model


def own_step():
    return OwnStep([keras.Input((5,)), dense(), synchronized(), layers.Dense(1)])


MODELS = {each.__name__: each for each in (behind_statistics, own_layer, used_twice, subclassed)}


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_behind_synchronized_statistics(name):
    assert_equivalent(Trial(lambda: compiled(MODELS[name](), metrics=["mae"])))


@pytest.mark.full
@pytest.mark.parametrize("options", [{"run_eagerly": True}, {"steps_per_execution": 3}])
def test_other_ways_to_run(options):
    # eager replicas must know the number of samples, which the last batch has fewer of
    assert_equivalent(Trial(lambda: compiled(own_layer(), **options)))


@pytest.mark.full
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


@pytest.mark.full
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
