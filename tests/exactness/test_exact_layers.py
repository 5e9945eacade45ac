"""Layers with state of their own: batch normalisation, dropout."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import (
    ALL_SHARES,
    Trial,
    arrays,
    assert_equivalent,
    assert_replicas_agree,
    dense_model,
    masked_words,
    needs_no_xla,
    three_replicas,
)

sgd = functools.partial(keras.optimizers.SGD, 0.1)


def test_synchronized_batch_normalization():
    # the gradient through the statistics is compared by way of the first layer's weights
    def layers():
        return [
            keras.layers.Dense(4),
            keras.layers.BatchNormalization(synchronized=True, momentum=0.7),
            keras.layers.Activation("tanh"),
        ]

    build = functools.partial(dense_model, "mse", sgd, layers)
    assert_equivalent(Trial(build), ALL_SHARES)


@pytest.mark.full
def test_synchronized_batch_normalization_of_images():
    def build():
        model = keras.Sequential(
            [
                keras.Input((4, 4, 1)),
                keras.layers.Conv2D(2, 3, use_bias=False),
                keras.layers.BatchNormalization(synchronized=True),
                keras.layers.GlobalAveragePooling2D(),
                keras.layers.Dense(1),
            ]
        )
        model.compile(keras.optimizers.Adam(0.01), "mse")
        return model

    def data():
        x, y = arrays(features=16)
        return tf.data.Dataset.from_tensor_slices((x.reshape(-1, 4, 4, 1), y)).batch(8)

    # Adam divides by the root of squares of gradients that are nearly zero
    assert_equivalent(Trial(build, data), rtol=1e-3, atol=2e-5)


def test_variance_behind_a_mask_far_from_zero():
    x = (3000.0 + np.random.default_rng(3).normal(size=(6, 4, 1))).astype("float32")
    mask = np.arange(4) < np.array([4, 1, 2, 3, 4, 2])[:, None]

    class Normalize(keras.Model):
        def __init__(self):
            super().__init__()
            self.normalize = keras.layers.BatchNormalization(synchronized=True)

        def call(self, inputs):
            return self.normalize(inputs[0], training=True, mask=inputs[1])

    strategy = three_replicas()
    strategy.set_share_weights((4, 2, 1))
    with strategy.scope():
        model = Normalize()
    found = model.predict(tf.data.Dataset.from_tensors(((x, mask),)), verbose=0)
    expected = (x - x[mask].mean()) / np.sqrt(x[mask].var() + 1e-3)
    np.testing.assert_allclose(found, expected, atol=0.01)


@pytest.mark.full
def test_synchronized_batch_normalization_behind_a_mask():
    def build():
        model = keras.Sequential(
            [
                keras.Input((4,), dtype="int32"),
                keras.layers.Embedding(9, 3, mask_zero=True, embeddings_initializer="normal"),
                keras.layers.BatchNormalization(synchronized=True, momentum=0.7),
                keras.layers.GlobalAveragePooling1D(),
                keras.layers.Dense(1),
            ]
        )
        model.compile(sgd(), "mse")
        return model

    assert_equivalent(Trial(build, masked_words))


def batch_normalized(momentum=0.7):
    model = keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.BatchNormalization(momentum=momentum),
            keras.layers.Dense(1),
        ]
    )
    model.compile(sgd(), "mse")
    return model


def test_moving_statistics_are_means_over_samples():
    strategy = three_replicas()
    strategy.set_share_weights((4, 2, 1))
    with strategy.scope():
        model = batch_normalized()
    x, y = arrays(7)
    model.fit(tf.data.Dataset.from_tensor_slices((x, y)).batch(7), verbose=0)
    mean, variance = np.zeros(5), np.ones(5)
    shares = (x[:4], x[4:6], x[6:])
    new_mean = sum(len(part) / 7 * part.mean(0) for part in shares)
    new_variance = sum(len(part) / 7 * part.var(0) for part in shares)
    layer = model.layers[0]
    np.testing.assert_allclose(layer.moving_mean, 0.7 * mean + 0.3 * new_mean, rtol=1e-5)
    np.testing.assert_allclose(
        layer.moving_variance, 0.7 * variance + 0.3 * new_variance, rtol=1e-5
    )
    assert_replicas_agree(strategy, model)


@pytest.mark.full
def test_batch_normalization_on_a_single_used_replica_is_one_device():
    build = functools.partial(
        dense_model, "mse", sgd, lambda: [keras.layers.BatchNormalization(momentum=0.7)]
    )
    assert_equivalent(Trial(build), [(1, 0, 0), (0, 1, 0)])


@needs_no_xla
def test_dropout_on_replica_0_is_one_device():
    def layers():
        return [keras.layers.Dense(16), keras.layers.Dropout(0.5, seed=3)]

    # the other replicas draw other masks, so that (1, 0, 0) is the only exact share
    build = functools.partial(dense_model, "mse", sgd, layers)
    assert_equivalent(Trial(build, replica_state=False), [(1, 0, 0)])


class Masks(keras.Model):
    """Its output is the mask that dropout has drawn."""

    def __init__(self):
        super().__init__()
        self.dropout = keras.layers.Dropout(0.5, seed=3)
        self.seen = []

    def call(self, x):
        return self.dropout(tf.ones_like(x), training=True)

    def train_step(self, data):
        mask = self(data, training=True)
        step = tf.distribute.get_replica_context().replica_id_in_sync_group
        tf.numpy_function(self.note, [step, mask], tf.int32)
        return {"kept": tf.reduce_mean(mask)}

    def note(self, replica, mask):
        self.seen.append((int(replica), mask))
        return np.int32(0)


def test_replicas_drop_different_units():
    strategy = three_replicas()
    strategy.set_share_weights((1, 1, 1))
    with strategy.scope():
        model = Masks()
        model.compile()
    model.fit(tf.data.Dataset.from_tensors(tf.ones((3, 64))).repeat(2), verbose=0)
    masks = {(replica, mask.tobytes()) for replica, mask in model.seen}
    assert len(model.seen) == 6
    assert len({mask for _, mask in masks}) == 6, "two replicas or two steps had one mask"


@pytest.mark.full
def test_replicas_drop_different_units_in_predict():
    strategy = three_replicas()
    strategy.set_share_weights((1, 1, 1))
    with strategy.scope():
        model = Masks()
    rows = model.predict(np.ones((3, 64), "float32"), verbose=0)
    assert len({row.tobytes() for row in rows}) == 3, "two replicas had one mask"
    expected = Masks().predict(np.ones((1, 64), "float32"), verbose=0)
    np.testing.assert_array_equal(rows[:1], expected)


class NormalizesAlways(keras.Model):
    def __init__(self):
        super().__init__()
        self.normalization = keras.layers.BatchNormalization(synchronized=True)

    def call(self, x):
        return self.normalization(x, training=True)


@pytest.mark.full
def test_predict_with_the_statistics_of_the_batch():
    strategy = three_replicas()
    strategy.set_share_weights((3, 0, 5))
    with strategy.scope():
        model = NormalizesAlways()
    x, _ = arrays(8)
    expected = NormalizesAlways().predict(x, verbose=0)
    np.testing.assert_allclose(model.predict(x, verbose=0), expected, rtol=1e-4, atol=1e-6)


def test_float8_training_is_refused():
    strategy = three_replicas()
    with strategy.scope():
        model = dense_model(layers=lambda: [keras.layers.Dense(4)])
        model.quantize("float8")
        model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"overwritten with their gradient.*inputs_scale"):
        model.fit(*arrays(8), verbose=0)
