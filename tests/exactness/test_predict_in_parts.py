"""`predict` in micro-batches returns what one device does, in the memory of one part."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from devices import DEVICES
from equivalence import arrays, batches, compare_structures, dense_model, values_of
from keras import ops
from test_exact_inputs import Scores, Tagger
from test_micro_batches import (
    Codes,
    CountsTraces,
    KeepsVariable,
    Sharpness,
    in_parts,
    own_step,
)
from test_own_state import Averages, Counters, Extremes, Sums, with_state
from test_predictions import JOINED, REFUSED, Model, dense, nobody_is_waited_for  # noqa: F401

from keras_het import HeterogeneousStrategy

SHARES = ((3, 0, 5), (5, 2, 1), (0, 0, 1))
SIZES = (2, 3, (None, 1, 2))
in_float64 = pytest.mark.usefixtures("double_precision")


def both(build, strategy):
    """A model on one device, and the same one in parts."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(7)
    single = build()
    keras.utils.set_random_seed(7)
    with strategy.scope():
        return single, build()


def assert_exact(build, data, size=2, predict=None, shares=SHARES, devices=3):
    strategy = in_parts(size, devices)
    predict = predict or (lambda model, data: model.predict(data, verbose=0))
    single, model = both(build, strategy)
    expected = predict(single, data())
    for weights in shares:
        strategy.set_share_weights(weights[:devices])
        actual = predict(model, data())
        keras.tree.assert_same_structure(actual, expected)
        flat = [list(map(dense, keras.tree.flatten(each))) for each in (actual, expected)]
        compare_structures(*flat, 1e-9, 1e-11, f"shares {weights}")


def columns():
    x, y = arrays()
    return tf.data.Dataset.from_tensor_slices(({"a": x, "b": y}, y)).batch(8)


def several_inputs():
    a, b = keras.Input((5,), name="a"), keras.Input((1,), name="b")
    joined = keras.layers.Concatenate()([keras.layers.Dense(3, "tanh")(a), b])
    outputs = {
        "value": keras.layers.Dense(1)(joined),
        "others": [joined, keras.layers.Dense(2, "softmax")(joined)],
    }
    return keras.Model({"a": a, "b": b}, outputs)


class Described(keras.Model):
    """Returns more than its outputs, and no output for some."""

    def __init__(self):
        super().__init__()
        self.head = keras.layers.Dense(2)
        self.head.build((None, 5))
        self.built = True

    def call(self, x):
        return self.head(x)

    def predict_step(self, data):
        x, _ = data
        outputs = self(x, training=False)
        return {"outputs": outputs, "size": ops.norm(x, axis=1), "positive": outputs > 0}


def rows_of_words():
    random = np.random.default_rng(6)
    rows = [list(random.integers(1, 9, random.integers(1, 6))) for _ in range(22)]
    return tf.data.Dataset.from_tensor_slices(tf.ragged.constant(rows, dtype=tf.int32)).batch(8)


class Words(Tagger):
    """Returns ragged rows of vectors, and one vector for each sample."""

    def call(self, words):
        embedded = tf.ragged.map_flat_values(self.embedding, words)
        return embedded, tf.reduce_sum(embedded, axis=1), words


class OfSparse(keras.Model):
    def __init__(self):
        super().__init__()
        self.kernel = self.add_weight(shape=(5, 2))
        self.built = True

    def call(self, x):
        return {"dense": tf.sparse.sparse_dense_matmul(x, self.kernel), "sparse": x}


def sparse_rows():
    x = arrays()[0].astype("float64") * (arrays(seed=1)[0] > 0)
    return tf.data.Dataset.from_tensor_slices(tf.sparse.from_dense(x)).batch(8)


def samples():
    return tf.data.Dataset.from_tensor_slices(arrays()[0]).batch(8)


CASES = {
    "dense": (dense_model, batches),
    "several_inputs": (several_inputs, columns),
    "predict_step": (Described, batches),
    "ragged": (Words, rows_of_words),
    "sparse": (OfSparse, sparse_rows),
}
# in float32, and each sample's numbers are computed from its own alone
OF_SAMPLES = {
    "losses": (Scores, samples),
    **{name: (lambda each=each: Model(each), samples) for name, each in JOINED.items()},
}


@in_float64
@pytest.mark.quick("several_inputs-2")
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_parts_give_what_one_device_gives(case, size):
    assert_exact(*CASES[case], size)


@pytest.mark.full
@pytest.mark.parametrize("case", OF_SAMPLES)
def test_rows_of_all_kinds_come_in_order(case):
    assert_exact(*OF_SAMPLES[case])


@in_float64
@pytest.mark.full
@pytest.mark.parametrize("case", ["dense", "ragged"])
def test_a_single_device_predicts_in_parts(case):
    assert_exact(*CASES[case], shares=((1,),), devices=1)


@pytest.mark.full
@in_float64
def test_executions_of_several_steps():
    def build():
        model = several_inputs()
        model.compile(steps_per_execution=2)
        return model

    assert_exact(build, columns)


@pytest.mark.full
@in_float64
def test_a_single_batch():
    assert_exact(dense_model, lambda: arrays(7)[0], predict=keras.Model.predict_on_batch)


@pytest.mark.quick("Extremes")
@pytest.mark.parametrize("layer", [Counters, Sums, Extremes, Averages])
def test_state_becomes_that_of_one_device(layer):
    class Always(layer):
        def call(self, inputs, training=False):
            return super().call(inputs, training=True)

    strategy = in_parts(2)
    models = both(lambda: with_state(Always), strategy)
    for weights in SHARES[:2]:
        strategy.set_share_weights(weights)
        for model in models:
            model.predict(arrays(11)[0], batch_size=7, verbose=0)
    expected, actual = (values_of(model.get_layer("own").weights) for model in models)
    compare_structures(actual, expected, 1e-5, 1e-6, "state")


class AlwaysNormalized(keras.Model):
    def __init__(self, synchronized=False):
        super().__init__()
        self.layer = keras.layers.BatchNormalization(
            momentum=0.5, epsilon=0.0, synchronized=synchronized
        )
        self.layer.build((None, 5))
        self.built = True

    def call(self, x):
        return self.layer(x, training=True)


@in_float64
def test_moving_statistics_are_the_mean_over_parts():
    """Each part, of 2, 3 and 3 samples, is normalised by itself, from the state before the step."""
    strategy = in_parts(3, 1)
    with strategy.scope():
        model = AlwaysNormalized()
    x = arrays(8)[0].astype("float64")
    actual = model.predict(x, batch_size=8, verbose=0)
    parts = np.split(x, [2, 5])
    expected = np.concatenate([(part - part.mean(0)) / part.std(0) for part in parts])
    np.testing.assert_allclose(actual, expected, rtol=1e-9)
    _, _, mean, variance = model.get_weights()
    sizes = [len(part) / 8 for part in parts]
    means = sum(size * part.mean(0) for size, part in zip(sizes, parts, strict=True))
    variances = sum(size * part.var(0) for size, part in zip(sizes, parts, strict=True))
    np.testing.assert_allclose(mean, 0.5 * means, rtol=1e-9)
    np.testing.assert_allclose(variance, 0.5 + 0.5 * variances, rtol=1e-9)


class Drops(Codes):
    def call(self, x, training=False):
        return super().call(x, training=True)


@pytest.mark.full
@in_float64
def test_parts_drop_different_units():
    seeds = []
    for size in (1, 4):
        with HeterogeneousStrategy(DEVICES[:1], micro_batch_size=size).scope():
            model = dense_model(layers=lambda: [Drops(name="codes")])
        model.predict(arrays(4)[0], batch_size=4, verbose=0)
        codes = model.get_layer("codes")
        assert np.array(codes.least) < np.array(codes.most)
        seeds.append(np.array(codes.dropout.seed_generator.state))
    np.testing.assert_array_equal(*seeds)


def graph_of(strategy):
    """The operations of a prediction for 8 samples, and what it returns."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(7)
    operations = []

    class Looks(keras.Model):
        def predict_step(self, data):
            operations.append(tf.compat.v1.get_default_graph())
            return super().predict_step(data)

        def call(self, x):
            return self.drops(x)

    with strategy.scope():
        model = Looks()
        model.drops = Drops(name="codes")
        model.drops.build((None, 5))
    outputs = model.predict(arrays(8)[0], batch_size=8, verbose=0)
    return [each.type for each in operations[0].get_operations()], outputs


@pytest.mark.full
def test_a_share_within_the_bound_is_not_cut():
    (plain, expected), (bounded, actual) = (
        graph_of(HeterogeneousStrategy(DEVICES[:2], micro_batch_size=size)) for size in (None, 4)
    )
    np.testing.assert_array_equal(actual, expected)
    added = {"While", "StatelessWhile", "TensorListPushBack", "TensorListConcatV2"}
    assert not added & set(plain)
    assert added & set(bounded)


@pytest.mark.full
def test_other_shares_do_not_trace_again():
    strategy = in_parts()
    strategy.set_share_weights((1, 1, 1))
    with strategy.scope():
        model = dense_model(layers=lambda: [CountsTraces()])
    model.predict(batches(), verbose=0)
    traces = CountsTraces.traces
    for shares in ((5, 0, 1), (0, 0, 1)):
        strategy.set_share_weights(shares)
        model.predict(batches(), verbose=0)
    assert CountsTraces.traces == traces


@pytest.mark.quick("nested-1")
@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("name", REFUSED)
def test_an_output_that_cannot_be_joined_is_named(name, devices):
    function, received = REFUSED[name]
    with HeterogeneousStrategy(DEVICES[:devices], micro_batch_size=2).scope():
        model = Model(function)
    says = f"rows of all replicas and micro-batches: .*Received: {received}.* Return what belongs"
    with pytest.raises(ValueError, match=says) as error:
        model.predict(arrays(16)[0], batch_size=8, verbose=0)
    assert "\n" not in str(error.value), "TensorFlow's pages surround the sentence"


class MeanOfBatch(Described):
    def predict_step(self, data):
        return {"mean": ops.mean(self(data[0])), "rows": self(data[0])}


@pytest.mark.parametrize("rows", [1, 8])
def test_a_mean_over_the_batch_is_refused_whether_it_is_cut_or_not(rows):
    with in_parts(2, 1).scope():
        model = MeanOfBatch()
    with pytest.raises(ValueError, match=r"output\['mean'\] of shape \[\] for 2 samples"):
        model.predict(batches(rows), verbose=0)


@pytest.mark.full
def test_parts_of_different_widths_are_refused():
    with in_parts(2, 1).scope():
        model = Tagger()
    words = tf.ragged.constant([[1, 2], [3], [6, 7, 8], [1]], dtype=tf.int32)
    says = r"output with the shapes \[2 2 3\]\[2 3 3\] in micro-batches.* Pad to a fixed width"
    with pytest.raises(ValueError, match=says) as error:
        model.predict(tf.data.Dataset.from_tensors(words), verbose=0)
    assert "\n" not in str(error.value)


UNCUT = {
    "runs eagerly": lambda: dense_model(run_eagerly=True),
    "assigns 'rows": lambda: dense_model(layers=lambda: [KeepsVariable()]),
    "normalises with statistics": lambda: AlwaysNormalized(synchronized=True),
}


@pytest.mark.parametrize("says", UNCUT)
def test_what_cannot_be_cut_is_named(says):
    with in_parts(2, 1).scope():
        model = UNCUT[says]()
    with pytest.raises(ValueError, match=says):
        model.predict(batches(), verbose=0)


@in_float64
@pytest.mark.full
def test_a_model_whose_training_cannot_be_cut_predicts():
    assert_exact(lambda: own_step(Sharpness), batches)
