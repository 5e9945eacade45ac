"""Shares that are computed in parts give what one device gives, or a replica for each part."""

import os
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from devices import DEVICES
from equivalence import (
    IS_QUICK,
    CountsTraces,
    Trial,
    assert_equivalent,
    assert_same_outcome,
    batches,
    build_seeded,
    dense_model,
    in_parts,
    masked_words,
    said,
    values_of,
)
from keras import ops
from test_exact_own_steps import Base, compiled

import keras_het
from keras_het import HeterogeneousStrategy

SHARES = ((3, 0, 5), (5, 2, 1))
pytestmark = pytest.mark.usefixtures("double_precision")


def several_outputs():
    """Losses with different divisors in one gradient."""
    inputs = keras.Input((4,), dtype="int32")
    hidden = keras.layers.Embedding(9, 3, mask_zero=True)(inputs)
    each = keras.layers.Dense(1, name="each")(hidden)
    whole = keras.layers.Dense(1, name="whole")(keras.layers.GlobalAveragePooling1D()(hidden))
    model = keras.Model(inputs, [each, whole])
    losses = ["mse", keras.losses.MeanAbsoluteError(reduction="sum")]
    model.compile(keras.optimizers.SGD(0.05), losses)
    return model


def words_to_several():
    words = np.concatenate([x for x, _ in masked_words()])
    targets = np.random.default_rng(1).normal(size=(*words.shape, 1))
    return tf.data.Dataset.from_tensor_slices((words, (targets, targets[:, 0]))).batch(8)


CASES = {
    "several divisors": (several_outputs, words_to_several, 2),
    "not divisible": (dense_model, batches, 3),
    "one sample each": (dense_model, batches, 1),
    "some replicas": (dense_model, batches, (None, 1, 2)),
}


@pytest.mark.quick("several divisors")
@pytest.mark.parametrize("case", CASES)
def test_parts_give_what_one_device_gives(case, caplog):
    build, data, size = CASES[case]
    trial = Trial(build, data, predict=False, infer_always=not IS_QUICK)
    assert_equivalent(trial, SHARES, 1e-9, 1e-11, strategy=in_parts(size))
    assert not said(caplog)


def trained(strategy, build, data=batches, **options):
    keras.backend.clear_session()
    with strategy.scope():
        model = build_seeded(build)
    trial = Trial(build, data, evaluate=False, predict=False, options=options)
    return model, trial.train(model, strategy.distribute(data()), inference=False)


def normalized():
    return dense_model(
        layers=lambda: [
            keras.layers.Dense(4),
            keras.layers.BatchNormalization(momentum=0.5, epsilon=0.1),
        ]
    )


@pytest.mark.full
def test_parts_are_like_replicas():
    """Shares of 6 and 2 in parts of 2: the moving statistics of four replicas with 2 each."""

    def data():
        return batches(16)

    replicas = HeterogeneousStrategy(DEVICES[:4])
    parts = HeterogeneousStrategy(DEVICES[:2], share_weights=[3, 1], micro_batch_size=2)
    _, expected = trained(replicas, normalized, data)
    _, actual = trained(parts, normalized, data)
    assert_same_outcome(actual, expected, 1e-9, 1e-11)


class Codes(keras.layers.Layer):
    """Keeps the least and the largest pattern of dropped units."""

    def __init__(self, **options):
        super().__init__(**options)
        self.dropout = keras.layers.Dropout(0.5, seed=4)
        for name in ("least", "most"):
            start = 1e6 if name == "least" else -1e6
            setattr(
                self,
                name,
                self.add_weight((), keras.initializers.Constant(start), name=name, trainable=False),
            )

    def build(self, shape):
        self.dropout.build(shape)

    def call(self, x):
        ones = ops.ones_like(ops.repeat(x[:, :1], 16, axis=1))
        dropped = self.dropout(ones, training=True)
        codes = ops.sum(dropped * ops.cast(2.0 ** np.arange(16), dropped.dtype), axis=1)
        self.least.assign(ops.minimum(self.least, ops.min(codes)))
        self.most.assign(ops.maximum(self.most, ops.max(codes)))
        return x + 0.001 * dropped[:, :5]


def with_codes():
    return dense_model(layers=lambda: [Codes(name="codes")])


LOOPS = {
    "fit": lambda model, data: model.fit(data, verbose=0),
    "predict": lambda model, data: model.predict(data, verbose=0),
}


@pytest.mark.quick("fit")
@pytest.mark.parametrize("loop", LOOPS)
def test_parts_drop_different_units(loop):
    seeds = []
    for size in (1, 4):
        with HeterogeneousStrategy(DEVICES[:1], micro_batch_size=size).scope():
            model = with_codes()
        LOOPS[loop](model, batches(4, size=4))  # one step: another one draws others anyhow
        codes = model.get_layer("codes")
        assert np.array(codes.least) < np.array(codes.most)
        seeds.append(np.array(codes.dropout.seed_generator.state))
    np.testing.assert_array_equal(*seeds)


@pytest.mark.full
def test_share_within_the_bound_is_not_cut():
    plain = HeterogeneousStrategy(DEVICES[:2])
    bounded = HeterogeneousStrategy(DEVICES[:2], micro_batch_size=4)
    (a, expected), (b, actual) = trained(plain, with_codes), trained(bounded, with_codes)
    assert_same_outcome(actual, expected, 0.0, 0.0)
    for got, want in zip(values_of(b.weights), values_of(a.weights), strict=True):
        np.testing.assert_array_equal(got, want)
    predicted = [each.predict(batches(4, size=4), verbose=0) for each in (a, b)]
    np.testing.assert_array_equal(*predicted)


@pytest.mark.full
@pytest.mark.parametrize("loop", LOOPS)
def test_other_shares_do_not_trace_again(loop):
    strategy = in_parts()
    strategy.set_share_weights((1, 1, 1))
    with strategy.scope():
        model = dense_model(layers=lambda: [CountsTraces()])
    LOOPS[loop](model, batches())
    traces = CountsTraces.traces
    for shares in ((5, 0, 1), (0, 0, 1)):
        strategy.set_share_weights(shares)
        LOOPS[loop](model, batches())
    assert CountsTraces.traces == traces


@pytest.mark.full
def test_shares_in_parts_are_balanced():
    strategy = HeterogeneousStrategy(DEVICES[:2], micro_batch_size=2)
    with strategy.scope():
        model = dense_model()
    balancer = keras_het.callbacks.BatchBalancer()
    model.fit(strategy.distribute(batches(64)), epochs=2, verbose=0, callbacks=[balancer])
    assert balancer.plans
    # with XLA, the time of a step that compiles counts as unknown
    assert np.nanmin([row["seconds"] for row in balancer.measurements]) > 0


class Step(Base):
    def gradients(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        return loss, tape.gradient(loss, self.trainable_variables)


def own_step(kind):
    return compiled(kind)()


class ReadsAfterUpdate(Base):
    def train_step(self, data):
        logs = super().train_step(data)
        return {**logs, "norm": ops.norm(self.head.kernel)}


class TwoUpdates(Step):
    def train_step(self, data):
        for _ in range(2):
            loss, gradients = self.gradients(data)
            self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


class BranchesOnResult(Base):
    def train_step(self, data):
        loss = super().train_step(data)["loss"]
        return {"double": tf.cond(loss > 0, lambda: 2 * loss, lambda: loss)}


class Sharpness(Step):
    def train_step(self, data):
        loss, gradients = self.gradients(data)
        reduced = keras_het.reduce_over_replicas(gradients)
        self.optimizer.apply(reduced, self.trainable_variables)
        return {"loss": loss}


class InCondition(Step):
    def train_step(self, data):
        loss, gradients = self.gradients(data)

        def update():
            self.optimizer.apply(gradients, self.trainable_variables)
            return 0

        tf.cond(loss > 0, update, lambda: 0)
        return {"loss": loss}


class KeepsVariable(keras.layers.Layer):
    def __init__(self, **options):
        super().__init__(**options)
        self.rows = tf.Variable(0.0, trainable=False, name="rows")

    def call(self, x):
        self.rows.assign_add(tf.cast(tf.shape(x)[0], tf.float32))
        return x


class MasksByWeight(keras.layers.Layer):
    def __init__(self, **options):
        super().__init__(**options)
        self.score = keras.layers.Dense(1)
        self.supports_masking = True

    def build(self, shape):
        self.score.build(shape)

    def compute_mask(self, inputs, mask=None):
        return self.score(inputs)[..., 0] > 0

    def call(self, inputs):
        return inputs


def masked_by_weight():
    layers = [keras.Input((4, 1)), MasksByWeight(), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile("sgd", "mse")
    return model


def vectors():
    words = np.random.default_rng(1).normal(size=(8, 4, 1))
    return tf.data.Dataset.from_tensor_slices((words, words)).batch(8)


def synchronized():
    return dense_model(layers=lambda: [keras.layers.BatchNormalization(synchronized=True)])


REFUSED = {
    "normalises with statistics of the global batch": synchronized,
    "reads .*kernel.* after the update": lambda: own_step(ReadsAfterUpdate),
    "reads .*kernel.* after the update of": lambda: own_step(TwoUpdates),
    "computed from a metric's result, 'double'": lambda: own_step(BranchesOnResult),
    "reduce_over_replicas": lambda: own_step(Sharpness),
    "within tf.cond": lambda: own_step(InCondition),
    "assigns 'rows": lambda: dense_model(layers=lambda: [KeepsVariable()]),
    "a mask, .* depends on more than the batch": masked_by_weight,
    "runs eagerly": lambda: dense_model(run_eagerly=True),
}


@pytest.mark.quick("computed from a metric's result, 'double'", "assigns 'rows")
@pytest.mark.parametrize("says", REFUSED)
def test_what_cannot_be_cut_is_named(says):
    strategy = HeterogeneousStrategy(DEVICES[:1], micro_batch_size=2)
    with strategy.scope():
        model = build_seeded(REFUSED[says])
    data = vectors() if "mask" in says else batches()
    with pytest.raises(ValueError, match=says):
        model.fit(data, verbose=0)


@pytest.mark.parametrize("given", [0, [2], {7: 1}])
def test_sizes_must_fit_the_replicas(given):
    with pytest.raises(ValueError, match="micro_batch_size"):
        HeterogeneousStrategy(DEVICES[:2], micro_batch_size=given)


PROGRAM = """
import sys
import keras, numpy as np, tensorflow as tf
import keras_het
size, rows, loop = int(sys.argv[1]) or None, int(sys.argv[2]), sys.argv[3]
strategy = keras_het.HeterogeneousStrategy(devices=["CPU:0"], micro_batch_size=size)
with strategy.scope():
    model = keras.Sequential([keras.Input((8,))])
    for _ in range(6):
        model.add(keras.layers.Dense(4096, "tanh"))
        model.add(keras.layers.Dense(8))
    model.add(keras.layers.Dense(1))
    model.compile("sgd", "mse")
x = np.ones((rows, 8), "float32")
if loop == "fit":
    model.fit(x, x[:, :1], batch_size=rows, epochs=2, verbose=0)
else:
    model.predict(x, batch_size=rows, verbose=0)
used = tf.config.experimental.get_memory_info("CPU:0")
print("bytes", used["peak"] - used["current"])
"""


def peak_memory(loop, *arguments):
    """Bytes that a step takes; the arguments are the size of parts, 0 for none, and the samples."""
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, arguments), loop],
        capture_output=True,
        text=True,
        timeout=240,
        # the one allocator that counts on every CPU
        env={**os.environ, "TF_CPU_ALLOCATOR_USE_BFC": "true"},
    )
    assert result.returncode == 0, result.stderr
    return int(result.stdout.split()[-1])


@pytest.mark.full
@pytest.mark.parametrize("loop", ["fit", "predict"])
def test_memory_is_that_of_one_part(loop):
    """Peak memory of a step of 4096 samples, whole and in parts, and of a part alone."""
    whole, in_parts, part = (
        peak_memory(loop, *each) for each in ((0, 4096), (256, 4096), (0, 256))
    )
    assert in_parts < 1.4 * part, (whole, in_parts, part)
    assert whole > 8 * in_parts, (whole, in_parts, part)
