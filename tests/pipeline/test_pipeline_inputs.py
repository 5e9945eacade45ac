"""Batches of other kinds than dense numbers go through a pipeline as through one device."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from pipeline_training import DEVICES

import keras_het
from keras_het.strategy.pipeline.edges import Message, Messages, Spec

L = keras.layers
pytestmark = pytest.mark.usefixtures("logical_devices")
X = np.random.default_rng(0).random((12, 4)).astype("float32")
WORDS = np.array([["a"], ["b"], ["c"]] * 4)


def sparse():
    return keras.Input((4,), sparse=True), L.Dense(3), tf.sparse.from_dense(X * (X > 0.5))


def text():
    layer = keras.Sequential(
        [L.StringLookup(vocabulary=["a", "b"]), L.Embedding(3, 2), L.Flatten()]
    )
    return keras.Input((1,), dtype="string"), layer, WORDS


def truth():
    layer = L.Lambda(lambda t: keras.ops.cast(t, "float32"))
    return keras.Input((4,), dtype="bool"), layer, X > 0.5


@pytest.mark.full
@pytest.mark.parametrize("make", [sparse, text, truth])
def test_inputs(make):
    found = []
    strategy = keras_het.PipelineStrategy(["middle"], 2, DEVICES[:2])
    for scope in (strategy.scope(), contextlib.nullcontext()):
        keras.utils.set_random_seed(1)
        with scope:
            inputs, layer, x = make()
            model = keras.Model(inputs, L.Dense(1)(L.Dense(3, name="middle")(layer(inputs))))
            model.compile("sgd", "mse", jit_compile=False)
        data = tf.data.Dataset.from_tensor_slices((x, X[:, :1])).batch(5)
        model.fit(data, epochs=2, verbose=0)
        found.append([*model.get_weights(), model.predict(data, verbose=0)])
    for ours, one_device in zip(*found, strict=True):
        np.testing.assert_allclose(ours, one_device, rtol=1e-4, atol=1e-5)


def test_an_optional_input_that_is_missing():
    class Sum(L.Layer):
        def call(self, one, other=None):
            return one if other is None else one + other

    strategy = keras_het.PipelineStrategy(num_micro_batches=2, devices=DEVICES[:1])
    with strategy.scope():
        inputs = [keras.Input((4,)), keras.Input((4,), optional=True)]
        model = keras.Model(inputs, L.Dense(1)(Sum()(*inputs)))
    with pytest.raises(ValueError, match=r"Received: None for an optional one\. Build the model"):
        model.predict(tf.data.Dataset.from_tensors(((X, None), X)), verbose=0)


@pytest.mark.full
def test_layers_that_were_quantized_since():
    strategy = keras_het.PipelineStrategy(["middle"], 2, DEVICES[:2])
    with strategy.scope():
        inputs = keras.Input((4,))
        model = keras.Model(inputs, L.Dense(1)(L.Dense(3, name="middle")(inputs)))
        model.compile("sgd", "mse", jit_compile=False)
    before = model.predict(X, verbose=0)
    model.quantize("int8")
    np.testing.assert_allclose(model.predict(X, verbose=0), before, atol=0.1)


class Transport:
    """Knows how many dimensions a tensor has, but no size of them."""

    process = 1

    def receive(self, rank, dtype, source, number):
        value = tf.compat.v1.placeholder(dtype, [None] * rank)
        return value


class Edges:
    def messages(self, *_):
        for number, kind in enumerate(("tensor", "mask")):
            yield Message(kind, 3, 0, 1), 0, 1, number


def test_received_tensors_have_known_sizes():
    specs = {3: Spec(tf.float32, tf.TensorShape([None, 5, 8]), 2)}
    with tf.Graph().as_default():
        messages = Messages(Edges(), Transport(), specs, 0)
        ((_, value, mask),) = messages.receive(training=True, is_additive=True)
        assert value.shape.as_list() == [None, 5, 8]
        assert mask is not None and mask.shape.rank == 2
