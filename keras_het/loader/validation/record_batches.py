"""Arrow record batches, the form in which TFDV reads data."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from keras_het.loader.nested import Rows
from keras_het.loader.validation.tfdv_adapter import pyarrow

_GREATEST = 2**63 - 1


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
        counts = np.bincount(value.indices.numpy()[:, 0], minlength=int(value.dense_shape[0]))
        return _lists(name, value.values.numpy(), np.concatenate([[0], np.cumsum(counts)]))
    if isinstance(value, tf.RaggedTensor):
        return _lists(name, value.flat_values.numpy(), value.row_splits.numpy())
    array = np.asarray(value)
    if array.ndim not in (1, 2):
        raise TypeError(
            f"Feature {name!r} has shape {array.shape}; expected [rows] or [rows, values]. Derive "
            "features of lower rank, as keras_het.loader.validation.features_of_batch does."
        )
    values = array.shape[1] if array.ndim == 2 else 1
    return _lists(name, array.ravel(), np.arange(len(array) + 1) * values)


def _lists(name: str, values: np.ndarray, splits: np.ndarray) -> pyarrow.LargeListArray:
    offsets = pyarrow.array(splits.astype(np.int64))
    return pyarrow.LargeListArray.from_arrays(offsets, _values(name, values))


def _check_fits(name: str, values: np.ndarray) -> None:
    # int(): NumPy 1 compares uint64 with int in float64, in which 2**63 - 1 is 2**63
    if values.dtype == np.uint64 and values.size and int(values.max()) > _GREATEST:
        raise ValueError(
            f"The integers of TensorFlow Data Validation end at 2**63 - 1. Received: feature "
            f"{name!r} with {int(values.max())}. Give a function `features` that makes strings "
            "of ids (tf.strings.as_string), or float64 of numbers."
        )


def _values(name: str, values: np.ndarray) -> pyarrow.Array:
    kind = values.dtype.kind
    if kind in "iub":
        _check_fits(name, values)
        return pyarrow.array(values.astype(np.int64))
    if kind in "OSU":
        return pyarrow.array([_bytes(name, value) for value in values], pyarrow.large_binary())
    if values.dtype == np.float64:
        return pyarrow.array(values)
    if kind in "fV":  # V: bfloat16 and the like
        with contextlib.suppress(TypeError, ValueError):
            return pyarrow.array(values.astype(np.float32))
    raise TypeError(
        f"Feature {name!r} has type {values.dtype}; expected numbers, booleans or strings."
    )


def _bytes(name: str, value: object) -> bytes:
    if isinstance(value, (bytes, str)):
        return value.encode() if isinstance(value, str) else value
    raise TypeError(f"Feature {name!r} holds {type(value)}; expected numbers, booleans or strings.")
