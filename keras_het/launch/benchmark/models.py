"""Models and synthetic data: large ones for GPUs, small ones for emulated devices."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

_CLASSES, _WORDS = 1000, 32_000
_SEED = 0


def convnet(is_small: bool) -> keras.Model:
    """Return ResNet50 for images of 224 x 224 pixels, or a few convolutions for 16 x 16."""
    if not is_small:
        inputs = keras.Input((224, 224, 3), dtype="uint8")
        images = keras.layers.Rescaling(1 / 127.5, offset=-1.0)(inputs)
        network = keras.applications.ResNet50(weights=None, classes=_CLASSES)
        return keras.Model(inputs, network(images))
    layers = [
        keras.Input((16, 16, 3), dtype="uint8"),
        keras.layers.Rescaling(1 / 127.5, offset=-1.0),
        keras.layers.Conv2D(8, 3, activation="relu"),
        keras.layers.GlobalAveragePooling2D(),
        keras.layers.Dense(_CLASSES, activation="softmax"),
    ]
    return keras.Sequential(layers)


def transformer(is_small: bool) -> keras.Model:
    """Return a decoder of six blocks for 256 words, or of one small block for 16."""
    blocks, width, heads, length = (1, 16, 2, 16) if is_small else (6, 512, 8, 256)
    words = _WORDS if not is_small else 64
    inputs = keras.Input((length,), dtype="int32")
    hidden = keras.layers.Embedding(words, width)(inputs)
    for _ in range(blocks):
        normalized = keras.layers.LayerNormalization()(hidden)
        attention = keras.layers.MultiHeadAttention(heads, width // heads)
        hidden = hidden + attention(normalized, normalized, use_causal_mask=True)
        normalized = keras.layers.LayerNormalization()(hidden)
        wide = keras.layers.Dense(4 * width, activation="gelu")(normalized)
        hidden = hidden + keras.layers.Dense(width)(wide)
    outputs = keras.layers.Dense(words, activation="softmax", dtype="float32")(hidden)
    return keras.Model(inputs, outputs)


MODELS: dict[str, Callable[[bool], keras.Model]] = {
    "convnet": convnet,
    "transformer": transformer,
}


def endless_batches(model: keras.Model, batch_size: int) -> tf.data.Dataset:
    """Return the same random batch again and again, so that no step waits for data."""
    random = np.random.default_rng(_SEED)
    shape, classes = model.input_shape[1:], model.output_shape[-1]
    highest = 256 if len(shape) == 3 else classes
    x = random.integers(0, highest, (batch_size, *shape), "int32")
    y = random.integers(0, classes, (batch_size, *model.output_shape[1:-1]), "int32")
    return tf.data.Dataset.from_tensors((x.astype(model.inputs[0].dtype), y)).repeat()
