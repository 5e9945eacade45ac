"""`predict`, whole or in micro-batches, returns what one device does, or says why it does not."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import (
    arrays,
    batches,
    compare_structures,
    dense_model,
    in_parts,
    needs_no_xla,
    three_replicas,
    values_of,
)
from keras import ops
from test_exact_inputs import Tagger
from test_micro_batches import KeepsVariable, Sharpness, own_step
from test_own_state import Averages, Counters, Extremes, Sums, with_state

from keras_het.strategy.cluster import agreement

SHARES = ((3, 0, 5), (5, 2, 1), (0, 0, 1))
SIZES = (2, 3, (None, 1, 2))
in_float64 = pytest.mark.usefixtures("double_precision")


@pytest.fixture(autouse=True)
def nobody_is_waited_for(monkeypatch):
    """Workers give each other two seconds to hear of an error in the graph."""
    monkeypatch.setattr(agreement, "_SECONDS_TO_PASS_ON", 0.0)


class Model(keras.Model):
    """Returns a function of a batch and of a weight that has no row for each sample."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.prototypes = self.add_weight(shape=(4, 3), name="prototypes")

    def call(self, x):
        return self.function(x, self.prototypes)


# Where a model predicts: its strategy, the shares, and whether it runs eagerly.
PLACES = {
    "replicas": (three_replicas, (4, 2, 1), False),
    "an empty one": (three_replicas, (3, 0, 5), False),
    "eager ones": (three_replicas, (1, 1, 1), True),
    "parts": (in_parts, (5, 2, 1), False),
    "parts of one": (lambda: in_parts(2, 1), (1,), False),
}


def predicted(function, place, rows=16):
    make, shares, run_eagerly = PLACES[place]
    make().set_share_weights(shares)
    with make().scope():
        model = Model(function)
    model.compile(run_eagerly=run_eagerly)
    return model.predict(arrays(rows)[0], batch_size=8, verbose=0)


def similarities(x):
    return tf.matmul(x, x, transpose_b=True)


# What the error says was received: by shapes, or else by the rows of a batch.
REFUSED = {
    "matrix": (lambda x, _: similarities(x), r"output of shape \[2, 2\] for 2 .* \[3, 3\] for 3"),
    "nested": (
        lambda x, _: {"one": x, "two": [{"three": (x, similarities(x))}]},
        r"output\['two'\]\[0\]\['three'\]\[1\] of shape \[2, 2\]",
    ),
    "wider": (lambda x, _: (x, tf.tile(similarities(x), [1, 2])), r"output\[1\] of shape \[2, 4\]"),
    "transposed": (lambda x, _: (x, tf.transpose(x)), r"output\[1\] of shape \[5, 2\]"),
    "prototypes": (lambda x, w: {"rows": x, "all": w}, r"output\['all'\] of shape \[4, 3\] for 2"),
    "scalar": (lambda x, _: {"rows": x, "mean": tf.reduce_mean(x)}, r"output\['mean'\] of shape"),
    "number": (lambda x, _: (x, 0.5), r"output\[1\] of shape \[\]"),
    "tiled": (lambda x, _: tf.tile(x, [2, 1]), r"output (with 16 rows for 8|of shape \[4, 5\])"),
    "some": (lambda x, _: tf.boolean_mask(x, x[:, 0] > 0), r"output with . rows for 8 samples"),
    "ragged": (
        lambda x, _: tf.RaggedTensor.from_tensor(similarities(x)),
        r"output of shape \[2, 2\] for 2",
    ),
    "one ragged row": (
        lambda x, _: tf.RaggedTensor.from_row_lengths(x[:, 0], [tf.shape(x)[0]]),
        r"output of shape \[1, 2\] for 2",
    ),
    "sparse": (lambda x, _: tf.sparse.from_dense(similarities(x)), r"output of shape \[2, 2\]"),
    "unknown": (
        lambda x, _: tf.numpy_function(lambda v: np.tile(v, (2, 1)), [x], tf.float32),
        r"output with 16 rows for 8 samples",
    ),
}


@pytest.mark.quick(
    "replicas-nested", "an empty one-tiled", "eager ones-matrix", "parts of one-nested"
)
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("place", PLACES)
def test_an_output_that_cannot_be_joined_is_named(place, name):
    function, received = REFUSED[name]
    says = f"rows of all replicas and micro-batches: .*Received: {received}.* Return what belongs"
    with pytest.raises(ValueError, match=says) as error:
        predicted(function, place)
    assert "\n" not in str(error.value), "TensorFlow's pages surround the sentence"


JOINED = {
    "ragged": lambda x, _: tf.RaggedTensor.from_row_lengths(
        x[:, 0], tf.ones_like(x[:, 0], tf.int64)
    ),
    "sparse": lambda x, _: {"sparse": tf.sparse.from_dense(x)},
    "wide": lambda x, _: (x[:, : tf.cast(tf.reduce_max(x) * 0, tf.int32) + 3], x[:, 0]),
    "unknown rank": lambda x, _: tf.numpy_function(lambda v: 2 * v, [x], tf.float32),
    "text": lambda x, _: tf.strings.as_string(x),
    "losses": lambda x, _: (
        keras.losses.MeanSquaredError(reduction=None)(x, 2 * x),
        tf.map_fn(lambda row: keras.losses.MeanSquaredError(reduction="sum")(row, 2 * row), x),
    ),
}


def dense(value):
    value = value.to_tensor() if isinstance(value, tf.RaggedTensor) else value
    return np.array(tf.sparse.to_dense(value) if isinstance(value, tf.SparseTensor) else value)


@needs_no_xla
@pytest.mark.quick("an empty one-unknown rank", "replicas-losses")
@pytest.mark.parametrize("name", JOINED)
@pytest.mark.parametrize("place", PLACES)
def test_rows_of_samples_come_in_order(place, name):
    outputs = predicted(JOINED[name], place, rows=17)
    expected = Model(JOINED[name]).predict(arrays(17)[0], batch_size=8, verbose=0)
    flat = [keras.tree.flatten(each) for each in (outputs, expected)]
    for ours, one_device in zip(*flat, strict=True):
        np.testing.assert_array_equal(dense(ours), dense(one_device))


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
        size = ops.norm(ops.cast(x, "float64"), axis=1)
        return {"outputs": outputs, "size": size, "positive": outputs > 0}


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


CASES = {
    "dense": (dense_model, batches),
    "several_inputs": (several_inputs, columns),
    "predict_step": (Described, batches),
    "ragged": (Words, rows_of_words),
    "sparse": (OfSparse, sparse_rows),
}


@pytest.mark.full
@in_float64
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("case", [*list(CASES)[:-1], pytest.param("sparse", marks=needs_no_xla)])
def test_parts_give_what_one_device_gives(case, size):
    assert_exact(*CASES[case], size)


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


@pytest.mark.full
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
