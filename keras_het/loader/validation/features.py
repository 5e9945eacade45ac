"""Named features of a Keras batch, and the Arrow columns in which TFDV reads them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import tensorflow as tf

from keras_het.loader.nested import Batch, Rows
from keras_het.loader.validation.tfdv_adapter import pyarrow

_PARTS = ("x", "label", "sample_weight")
_SUMMARY = {"mean": "mean", "standard_deviation": "std", "minimum": "min", "maximum": "max"}


def features_of_batch(batch: Batch) -> dict[str, Rows]:
    """The features of a batch by name.

    A batch is a mapping of tensors, or `x`, `(x, y)`, `(x, y, sample_weight)` as Keras takes them.
    Tensors in a mapping keep their names, after "sample_weight/" if they are weights; others are
    called "x", "label" and "sample_weight", with "/0", "/1"... if there are several. Rows of rank 0
    and 1 are features as they are. Mean, standard deviation, minimum and maximum stand for rows of
    higher rank, such as images.

    Args:
        batch: structure of dense, ragged or sparse tensors or arrays, shape [rows, ...].

    Returns:
        Names to arrays of shape [rows] or [rows, values], ragged or sparse tensors.

    Raises:
        ValueError: if two features have the same name, or a tensor has no rows.
        TypeError: if strings have a rank above 2.
    """
    parts = batch if isinstance(batch, (tuple, list)) else (batch,)
    if len(parts) > len(_PARTS):
        raise ValueError(
            "A batch must be x, (x, y) or (x, y, sample_weight). "
            f"Received: a tuple of {len(parts)} parts."
        )
    features: dict[str, Rows] = {}
    for part_name, part in zip(_PARTS, parts, strict=False):
        # the weights of several outputs have the names of these
        for name, leaf in _leaves(part_name, part, is_top=part_name != "sample_weight"):
            for derived, value in _derive(name, leaf):
                if derived in features:
                    raise ValueError(
                        f"Two features of the batch are called {derived!r}. Give a function "
                        "`features` that returns a mapping of names to tensors."
                    )
                features[derived] = value
    return features


def _leaves(name: str, part: Batch, is_top: bool = False) -> Iterator[tuple[str, Rows]]:
    if isinstance(part, Mapping):
        for key, value in part.items():
            yield from _leaves(str(key) if is_top else f"{name}/{key}", value)
    elif isinstance(part, (tuple, list)):
        for index, value in enumerate(part):
            yield from _leaves(f"{name}/{index}", value)
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
    rows = leaf if isinstance(leaf, tf.RaggedTensor) else np.asarray(leaf)
    # float64 only where the data has such numbers: it takes several times as long
    wide = np.result_type(tf.as_dtype(leaf.dtype).as_numpy_dtype, np.float32)
    flat = [np.ravel(getattr(row, "flat_values", row)).astype(wide, copy=False) for row in rows]
    for key, method in _SUMMARY.items():
        numbers = [getattr(row, method)() if row.size else np.nan for row in flat]
        yield f"{name}/{key}", np.array(numbers, np.float32)


def record_batch(features: Mapping[str, Rows]) -> pyarrow.RecordBatch:
    """Make a record batch in which each row of a feature is a list of values."""
    if not features:
        raise ValueError("There is no feature. Expected a mapping of names to tensors.")
    columns = {name: _column(name, value) for name, value in features.items()}
    rows = {name: len(column) for name, column in columns.items()}
    if len(set(rows.values())) > 1:
        raise ValueError(f"All features of a batch must have the same number of rows: {rows}.")
    return pyarrow.RecordBatch.from_arrays(list(columns.values()), list(columns))


def _column(name: str, value: Rows) -> pyarrow.LargeListArray:
    if isinstance(value, tf.SparseTensor):
        value = tf.sparse.reorder(value)
        row_of_value, rows = value.indices[:, 0], value.dense_shape[0]
        value = tf.RaggedTensor.from_value_rowids(value.values, row_of_value, rows)
    if isinstance(value, tf.RaggedTensor):
        values, splits = value.flat_values.numpy(), value.row_splits.numpy()
    else:
        array = np.asarray(value)
        if array.ndim not in (1, 2):
            raise TypeError(
                f"Feature {name!r} has shape {array.shape}; expected [rows] or [rows, values]. "
                "Derive features of lower rank, as features_of_batch does."
            )
        values, splits = array.ravel(), np.arange(len(array) + 1) * array[:1].size
    try:
        return pyarrow.LargeListArray.from_arrays(splits.astype(np.int64), _values(values))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"TensorFlow Data Validation cannot take feature {name!r}. Received: {error}; expected "
            "numbers, integers of at most 2**63 - 1, booleans or strings. Give a function "
            "`features` that makes such, as tf.strings.as_string does of ids."
        ) from error


def _values(values: np.ndarray) -> pyarrow.Array:
    kind = values.dtype.kind
    if kind in "OSU":
        texts = [tf.compat.as_bytes(value) for value in values]
        return pyarrow.array(texts, pyarrow.large_binary())
    if kind in "iub":
        return pyarrow.array(values).cast(pyarrow.int64())
    if values.dtype == np.float64:
        return pyarrow.array(values)
    if kind in "fV":  # V: bfloat16 and the like
        return pyarrow.array(values.astype(np.float32))
    raise TypeError(f"type {values.dtype}")
