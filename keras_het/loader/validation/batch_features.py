"""Names for the tensors of a Keras batch, and features derived from rows other than lists."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from keras_het.loader.nested import Batch, Rows

_MOST_CHANNELS = 4


def image_features(images: np.ndarray) -> dict[str, np.ndarray]:
    """Derive features of images of one size."""
    rows, height, width, channels = images.shape
    if channels > _MOST_CHANNELS:
        images, channels = images.reshape(rows, height, width * channels, 1), 1
    features: dict[str, np.ndarray] = {
        "height": np.full(rows, height, np.int64),
        "width": np.full(rows, width, np.int64),
    }
    if not height * width:
        return features
    # Each channel of an image in one piece: several times as fast as in steps.
    # No -1: a replica may have no rows.
    pixels = images.reshape(rows, images.shape[1] * images.shape[2], channels)
    pixels = pixels.transpose(0, 2, 1).astype(np.float32, order="C")
    features["minimum"], features["maximum"] = pixels.min(axis=(1, 2)), pixels.max(axis=(1, 2))
    means, deviations = pixels.mean(axis=2), pixels.std(axis=2)
    for channel in range(channels):
        features[f"channel_{channel}/mean"] = means[:, channel]
        features[f"channel_{channel}/standard_deviation"] = deviations[:, channel]
    return features


def ragged_image_features(images: tf.RaggedTensor) -> dict[str, np.ndarray]:
    """Derive the features of images of different sizes."""
    each = [image_features(_dense(image).numpy()[None]) for image in images]
    names = list(dict.fromkeys(name for features in each for name in features))
    missing = np.array([np.nan], np.float32)
    return {
        name: np.concatenate([features.get(name, missing) for features in each]) for name in names
    }


def _dense(image: tf.Tensor | tf.RaggedTensor) -> tf.Tensor:
    # if only heights differ, an image is a dense tensor
    return image.to_tensor() if isinstance(image, tf.RaggedTensor) else image


_PARTS = ("x", "label", "sample_weight")


def features_of_batch(batch: Batch) -> dict[str, Rows]:
    """The features of a batch by name.

    A batch is a mapping of tensors, or `x`, `(x, y)`, `(x, y, sample_weight)` as Keras takes them.
    Tensors in a mapping keep their names, after "sample_weight/" if they are weights; others are
    called "x", "label" and "sample_weight", with "/0", "/1"... if there are several. Rows of rank 0
    and 1 are features as they are. For images, [rows, height, width, channels], heights, widths,
    extremes and each channel's mean and standard deviation become features; for rows of other
    shapes mean, standard deviation and extremes.

    Args:
        batch: structure of dense, ragged or sparse tensors or arrays, shape [rows, ...].

    Returns:
        Names to arrays of shape [rows] or [rows, values], ragged or sparse tensors.

    Raises:
        ValueError: if two features have the same name, or a tensor has no rows.
        TypeError: if strings have a rank above 2.
    """
    features: dict[str, Rows] = {}
    for name, leaf in _named_leaves(batch):
        for derived, value in _derive(name, leaf):
            if derived in features:
                raise ValueError(
                    f"Two features of the batch are called {derived!r}. Give a function `features` "
                    "that returns a mapping of names to tensors."
                )
            features[derived] = value
    return features


def _named_leaves(batch: Batch) -> Iterator[tuple[str, Rows]]:
    parts = batch if isinstance(batch, (tuple, list)) else (batch,)
    if len(parts) > len(_PARTS):
        raise ValueError(
            "A batch must be x, (x, y) or (x, y, sample_weight). "
            f"Received: a tuple of {len(parts)} parts."
        )
    for name, part in zip(_PARTS, parts, strict=False):
        # the weights of several outputs have the names of these
        yield from _walk(name, part, is_top=name != "sample_weight")


def _walk(name: str, part: Batch, is_top: bool = False) -> Iterator[tuple[str, Rows]]:
    if isinstance(part, Mapping):
        for key, value in part.items():
            yield from _walk(str(key) if is_top else f"{name}/{key}", value)
    elif isinstance(part, (tuple, list)):
        for index, value in enumerate(part):
            yield from _walk(f"{name}/{index}", value)
    elif part is not None and not isinstance(part, tf.experimental.Optional):
        yield name, part


def _derive(name: str, leaf: Rows) -> Iterator[tuple[str, Rows]]:
    rank = len(getattr(leaf, "shape", ()))
    if rank == 0:
        raise ValueError(
            f"Feature {name!r} is a scalar; expected a tensor of shape [rows, ...]. A list counts "
            "as several tensors: make it an array."
        )
    if rank <= 2:
        yield name, leaf
        return
    if tf.as_dtype(leaf.dtype) == tf.string:
        raise TypeError(
            f"Feature {name!r} has strings of shape {tuple(leaf.shape)}; expected [rows] or [rows, "
            'values]. Give a function "features" that makes such of them, or numbers.'
        )
    if isinstance(leaf, tf.SparseTensor):
        leaf = tf.sparse.to_dense(leaf)
    if isinstance(leaf, tf.RaggedTensor):
        derived = ragged_image_features(leaf) if rank == 4 else _summary(leaf.to_list())
    else:
        array = np.asarray(leaf)
        derived = image_features(array) if rank == 4 else _summary(array)
    yield from ((f"{name}/{key}", value) for key, value in derived.items())


def _summary(rows: np.ndarray | list[Any]) -> dict[str, np.ndarray]:
    flat = [np.concatenate([*map(np.ravel, _flatten(row)), ()]).astype(np.float64) for row in rows]
    statistics: dict[str, Any] = {
        "mean": np.mean,
        "standard_deviation": np.std,
        "minimum": np.min,
        "maximum": np.max,
    }
    return {
        name: np.array([function(row) if row.size else np.nan for row in flat], np.float32)
        for name, function in statistics.items()
    }


def _flatten(row: object) -> Iterator[Any]:
    if isinstance(row, list):
        for part in row:
            yield from _flatten(part)
    else:
        yield row
