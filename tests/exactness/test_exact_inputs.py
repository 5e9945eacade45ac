"""Structures of inputs and outputs."""

import functools
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import (
    ALL_SHARES,
    ONLY_WHOLE_BATCHES,
    Trial,
    arrays,
    assert_equivalent,
    batches,
    masked_words,
    needs_no_xla,
    three_replicas,
    whole_and_in_parts,
)

from keras_het.strategy.cluster import agreement
from keras_het.strategy.exact.keras_step import at_least_one_row

adam = functools.partial(keras.optimizers.Adam, 0.05)


@pytest.fixture(autouse=True)
def nobody_is_waited_for(monkeypatch):
    """Workers give each other two seconds to hear of an error in the graph."""
    monkeypatch.setattr(agreement, "_SECONDS_TO_PASS_ON", 0.0)


def two_in_two_out():
    a, b = keras.Input((5,), name="a"), keras.Input((3,), name="b")
    joined = keras.layers.Concatenate()([keras.layers.Dense(3)(a), keras.layers.Dense(3)(b)])
    outputs = {
        "value": keras.layers.Dense(1, name="value")(joined),
        "kind": keras.layers.Dense(2, activation="softmax", name="kind")(joined),
    }
    model = keras.Model({"a": a, "b": b}, outputs)
    model.compile(
        adam(),
        {
            "value": keras.losses.MeanSquaredError(reduction="sum"),
            "kind": keras.losses.SparseCategoricalCrossentropy(reduction="mean_with_sample_weight"),
        },
        loss_weights={"value": 0.01, "kind": 2.0},
        metrics={"value": ["mae", keras.metrics.R2Score()], "kind": ["accuracy"]},
        weighted_metrics={"kind": ["accuracy"]},
    )
    return model


def columns():
    x, y = arrays()
    random = np.random.default_rng(5)
    inputs = {"a": x, "b": random.normal(size=(22, 3)).astype("float32")}
    targets = {"value": y, "kind": random.integers(0, 2, 22)}
    weights = {
        "value": random.uniform(0.1, 2, 22).astype("float32"),
        "kind": random.uniform(0.1, 2, 22).astype("float32"),
    }
    return inputs, targets, weights


@pytest.mark.full
def test_dictionaries_of_inputs_and_outputs():
    def data():
        return tf.data.Dataset.from_tensor_slices(columns()).batch(8, ONLY_WHOLE_BATCHES)

    assert_equivalent(Trial(two_in_two_out, data, infer_always=True), ALL_SHARES)


def ragged_rows():
    random = np.random.default_rng(6)
    return [list(random.integers(1, 9, random.integers(1, 6))) for _ in range(22)]


class MeanOfWords(keras.Model):
    def __init__(self):
        super().__init__()
        self.embedding = keras.layers.Embedding(9, 3)
        self.head = keras.layers.Dense(1)

    def call(self, words):
        embedded = tf.ragged.map_flat_values(self.embedding, words)
        return self.head(tf.reduce_mean(embedded, axis=1))


def ragged_model(**options):
    model = MeanOfWords()
    model.embedding.build(None)
    model.head.build((None, 3))
    model.built = True
    model.compile(adam(), "mse", metrics=["mae"], **options)
    return model


def ragged_data():
    _, y = arrays()
    rows = tf.ragged.constant(ragged_rows(), dtype=tf.int32)
    return tf.data.Dataset.from_tensor_slices((rows, y)).batch(8)


@pytest.mark.full
def test_ragged_inputs():
    assert_equivalent(Trial(ragged_model, ragged_data), ALL_SHARES)


class Tagger(keras.Model):
    """Pads to the longest row of what it is given."""

    def __init__(self):
        super().__init__()
        self.embedding = keras.layers.Embedding(9, 3)
        self.embedding.build(None)
        self.built = True

    def call(self, words):
        return self.embedding(words.to_tensor())


def tagged(strategy, rows, run_eagerly=False):
    with strategy.scope():
        model = Tagger()
    model.compile(run_eagerly=run_eagerly)
    words = tf.ragged.constant(rows, dtype=tf.int32, row_splits_dtype=tf.int64)
    data = tf.data.Dataset.from_tensors(words)
    return model.predict(data, verbose=0), model(words)


@pytest.mark.quick("shares1-False")
@pytest.mark.parametrize("run_eagerly", [False, True])
@pytest.mark.parametrize("shares", [(0, 1, 0), (1, 0, 1)])
def test_predictions_as_wide_as_the_rows_of_a_replica(shares, run_eagerly):
    strategy = three_replicas()
    strategy.set_share_weights(shares)
    rows = [[1, 2], [3, 4, 5], [6, 7, 8], [1]]
    predictions, expected = tagged(strategy, rows, run_eagerly)
    np.testing.assert_allclose(predictions, expected)


def test_predictions_of_different_widths_are_refused():
    strategy = three_replicas()
    strategy.set_share_weights((1, 0, 1))
    received = (
        r"Received: output with the shapes \[2 2 3\]\[0 . 3\]\[2 3 3\] .* Pad to a fixed width"
    )
    with pytest.raises(ValueError, match=received):
        tagged(strategy, [[1, 2], [3], [6, 7, 8], [1]])


@needs_no_xla
@pytest.mark.quick("adam")
@pytest.mark.parametrize(
    "make_optimizer", [lambda: keras.optimizers.SGD(0.1), adam], ids=["sgd", "adam"]
)
def test_sparse_inputs(make_optimizer):
    def build():
        inputs = keras.Input((6,), sparse=True)
        model = keras.Model(inputs, keras.layers.Dense(1)(inputs))
        model.compile(make_optimizer(), "mse")
        return model

    def data():
        x, y = arrays(features=6)
        x[x < 0.3] = 0
        sparse = tf.sparse.from_dense(x)
        return tf.data.Dataset.from_tensor_slices((sparse, y)).batch(8)

    assert_equivalent(Trial(build, data), ALL_SHARES)


@pytest.mark.full
def test_text_through_a_preprocessing_layer():
    def build():
        vectorize = keras.layers.TextVectorization(output_sequence_length=4)
        vectorize.set_vocabulary(["a", "b", "c"])
        model = keras.Sequential(
            [
                keras.Input((), dtype="string"),
                vectorize,
                keras.layers.Embedding(6, 3, mask_zero=True),
                keras.layers.GlobalAveragePooling1D(),
                keras.layers.Dense(1),
            ]
        )
        model.compile(adam(), "mse")
        return model

    def data():
        _, y = arrays()
        words = np.array(["a b", "c", "b b a", "a c b d"] * 6)[:22]
        return tf.data.Dataset.from_tensor_slices((words, y)).batch(8)

    assert_equivalent(Trial(build, data))


@pytest.mark.full
@whole_and_in_parts
@pytest.mark.parametrize("layer", ["LSTM", "GRU"])
def test_recurrent_layers_with_masks(layer, replicas):
    def build():
        model = keras.Sequential(
            [
                keras.Input((None,), dtype="int32"),
                keras.layers.Embedding(9, 3, mask_zero=True),
                getattr(keras.layers, layer)(3),
                keras.layers.Dense(1),
            ]
        )
        model.compile(adam(), "mse")
        return model

    assert_equivalent(Trial(build, masked_words, predict=False), strategy=replicas())


class SumOfParts(keras.Model):
    """A dense layer, and a second input that may be absent."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, inputs):
        if inputs["more"] is None:
            return self.dense(inputs["x"])
        return self.dense(inputs["x"]) + inputs["more"]


def sum_of_parts():
    model = SumOfParts()
    model.dense.build((None, 5))
    model.built = True
    model.compile(adam(), "mse", metrics=["mae"])
    return model


def without_weights(x, y):
    return {"x": x, "more": None}, y, None


@pytest.mark.full
def test_absent_inputs_and_weights():
    assert_equivalent(Trial(sum_of_parts, lambda: batches().map(without_weights)), ALL_SHARES)


@pytest.mark.full
def test_absent_parts_of_what_a_generator_yields():
    def fit(model, callbacks):
        steps = (without_weights(*batch) for batch in batches().repeat(4).as_numpy_iterator())
        return model.fit(steps, steps_per_epoch=4, epochs=3, verbose=0, callbacks=callbacks)

    assert_equivalent(Trial(sum_of_parts, fit=fit, evaluate=False, predict=False), ALL_SHARES)


@pytest.mark.parametrize("is_on_gpu", [False, True])
def test_what_stands_in_for_an_empty_share(is_on_gpu):
    """On a GPU no zeros, which layers would mask: cuDNN takes no row that is masked as a whole."""
    spec = SimpleNamespace(has_samples=tf.constant(False), is_on_gpu=is_on_gpu)
    data = {
        "words": tf.zeros([0, 3], tf.int32),
        "numbers": tf.zeros([0, 2]),
        "text": tf.zeros([0], tf.string),
        "scalar": tf.constant(7.0),
    }
    rows = at_least_one_row(spec, data)
    assert rows["words"].numpy().tolist() == [[int(is_on_gpu)] * 3]
    assert rows["numbers"].numpy().tolist() == [[float(is_on_gpu)] * 2]
    assert rows["text"].numpy().tolist() == [b""] and float(rows["scalar"]) == 7.0
