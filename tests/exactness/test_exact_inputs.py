"""Structures of inputs and outputs."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import ALL_SHARES, Trial, arrays, assert_equivalent

adam = functools.partial(keras.optimizers.Adam, 0.05)


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


def test_dictionaries_of_inputs_and_outputs():
    def data():
        return tf.data.Dataset.from_tensor_slices(columns()).batch(8)

    assert_equivalent(Trial(two_in_two_out, data, infer_always=True), ALL_SHARES)


def test_lists_of_inputs_and_outputs():
    def build():
        inputs = [keras.Input((5,)), keras.Input((3,))]
        joined = keras.layers.Concatenate()(inputs)
        outputs = [keras.layers.Dense(n, name=f"out_{n}")(joined) for n in (1, 2)]
        model = keras.Model(inputs, outputs)
        model.compile(adam(), ["mse", "mae"], metrics=[["mae"], ["mse"]])
        return model

    def data():
        x, y = arrays()
        return tf.data.Dataset.from_tensor_slices(
            ((x, x[:, :3]), (y, np.concatenate([y, -y], axis=1)))
        ).batch(8)

    assert_equivalent(Trial(build, data, infer_always=True))


def ragged_rows():
    random = np.random.default_rng(6)
    return [list(random.integers(1, 9, random.integers(1, 6))) for _ in range(22)]


def test_ragged_inputs():
    class MeanOfWords(keras.Model):
        def __init__(self):
            super().__init__()
            self.embedding = keras.layers.Embedding(9, 3)
            self.head = keras.layers.Dense(1)

        def call(self, words):
            embedded = tf.ragged.map_flat_values(self.embedding, words)
            return self.head(tf.reduce_mean(embedded, axis=1))

    def build():
        model = MeanOfWords()
        model.embedding.build(None)
        model.head.build((None, 3))
        model.built = True
        model.compile(adam(), "mse", metrics=["mae"])
        return model

    def data():
        _, y = arrays()
        rows = tf.ragged.constant(ragged_rows(), dtype=tf.int32)
        return tf.data.Dataset.from_tensor_slices((rows, y)).batch(8)

    assert_equivalent(Trial(build, data), ALL_SHARES)


@pytest.mark.parametrize("make_optimizer", [lambda: keras.optimizers.SGD(0.1), adam])
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


@pytest.mark.parametrize("layer", ["LSTM", "GRU"])
def test_recurrent_layers_with_masks(layer):
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

    def data():
        random = np.random.default_rng(7)
        words = random.integers(1, 9, (22, 4)).astype("int32")
        words[np.arange(4) >= random.integers(1, 5, 22)[:, None]] = 0
        return tf.data.Dataset.from_tensor_slices((words, arrays()[1])).batch(8)

    assert_equivalent(Trial(build, data, predict=False))
