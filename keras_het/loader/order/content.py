"""Hashes of a few rows, by which workers check that they have the same data."""

from __future__ import annotations

import hashlib
import logging
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import ArrayLike

from keras_het.loader import tf_data_adapter as adapter
from keras_het.loader.order import rows as row_functions
from keras_het.loader.order.pipeline_form import PipelineForm

_logger = logging.getLogger(__name__)

_MOST_ROWS = 16


def describe_content(dataset: tf.data.Dataset, form: PipelineForm) -> dict[str, str]:
    """Describe what tells data from other data, without a read that training would notice."""
    found: dict[str, str] = {}
    upstream = list(adapter.upstream_of(dataset))
    arrays = [
        tensor
        for node in upstream
        for tensor in adapter.tensors_of(node)
        if tensor.dtype not in (tf.resource, tf.variant) and tensor.shape.rank
    ]
    for number, array in enumerate(arrays):
        found[f"rows of array {number}"] = str(array.shape[0])
        found[f"some rows of array {number}"] = sample_of(array)
    for number, node in enumerate(node for node in upstream if _chooses_rows(node)):
        kind = type(node).__name__.removeprefix("_").removesuffix("Dataset").lower()
        for name, value in adapter.constants_of(node).items():
            found[f"{name} of {kind} ({number})"] = str(value)
    mapped = _first_mapped_sample(form)
    if mapped is not None:
        found["first sample after its maps"] = mapped
    return found


def _chooses_rows(node: tf.data.Dataset) -> bool:
    changes_rows = adapter.commutes_with_map(node) or adapter.is_batch(node)
    return changes_rows and not adapter.is_prefetch_or_options(node)


def _first_mapped_sample(form: PipelineForm) -> str | None:
    """Run the maps on one sample, unless that could be noticed elsewhere."""
    maps = form.element_maps
    if not maps or any(_may_be_noticed(node) for node in maps):
        return None
    if form.arrays:
        if not int(form.arrays[0].shape[0]):
            return None
        sample = tf.nest.pack_sequence_as(form.sample_spec, [array[:1] for array in form.arrays])
        source = tf.data.Dataset.from_tensor_slices(sample)
    else:
        source = form.stream
        while adapter.commutes_with_map(source):  # a shuffle would advance
            (source,) = adapter.inputs_of(source)
        nodes = list(adapter.upstream_of(source))
        if {type(node).__name__.strip("_") for node in nodes} - _PURE or any(
            map(_may_be_noticed, nodes)
        ):
            return None
        source = source.take(1)
    for node in maps:
        source = adapter.rebuild_on(node, source)
    for sample in source:
        return f"hash {int(row_functions.hash_rows(sample)) & (2**32 - 1):08x}"
    return None


def _may_be_noticed(node: tf.data.Dataset) -> bool:
    """Tell whether one more read could change later elements, or differ each time."""
    kinds = adapter.operations_in_functions(node)
    return (
        adapter.draws_from_generator(node)
        or adapter.writes_files(node)
        or bool(kinds & adapter.RANDOM_VALUE_OPERATIONS)
        or any(kind.startswith(_NOTICED) for kind in kinds)
    )


# Sources and operations for which a separate read of one element is quick and changes nothing.
_PURE = frozenset(
    {
        "BatchDataset",
        "ConcatenateDataset",
        "FixedLengthRecordDatasetV2",
        "FlatMapDataset",
        "InterleaveDataset",
        "MapDataset",
        "OptionsDataset",
        "ParallelBatchDataset",
        "ParallelInterleaveDataset",
        "ParallelMapDataset",
        "PrefetchDataset",
        "RangeDataset",
        "RepeatDataset",
        "ShardDataset",
        "SkipDataset",
        "TFRecordDataset",
        "TFRecordDatasetV2",
        "TakeDataset",
        "TensorDataset",
        "TensorSliceDataset",
        "TextLineDataset",
        "TextLineDatasetV2",
        "ZipDataset",
    }
)
# Python, state that the pipeline changes, orders, and elements that other processes yield once.
_NOTICED = (
    "PyFunc",
    "EagerPyFunc",
    "Assign",
    "Generator",
    "RandomShuffle",
    "Shuffle",
    "DataService",
)


def sample_of(array: Any) -> str:
    """Return a hash of up to 16 rows, from the first to the last, of an array of any kind."""
    try:
        return f"hash {hashlib.sha256(_sampled_bytes(array)).hexdigest()[:8]}"
    except Exception as error:  # from an unknown library
        _logger.debug("Data is not compared: %r", error)
        return "not compared"


def _sampled_bytes(array: Any) -> bytes:
    if isinstance(array, tf.SparseTensor):
        return b"".join(
            _sampled_bytes(part) for part in (array.indices, array.values, array.dense_shape)
        )
    count = int(array.shape[0]) if array.shape[0] is not None else int(array.nrows())
    rows = np.unique(np.linspace(0, max(count - 1, 0), _MOST_ROWS).astype(np.int64))[:count]
    if isinstance(array, (tf.Tensor, tf.RaggedTensor)):
        with tf.device(getattr(array, "flat_values", array).device):  # else all of it may move
            taken = tf.gather(array, rows)
        if isinstance(taken, tf.RaggedTensor):
            return b"".join(_bytes(part) for part in (taken.flat_values, *taken.nested_row_splits))
        return _bytes(taken)
    if hasattr(array, "iloc"):
        return _bytes(array.iloc[rows])
    # one by one: not every kind of array accepts a list of rows
    return b"".join(_bytes(array[int(row)]) for row in rows)


def _bytes(rows: ArrayLike) -> bytes:
    values = np.asarray(rows)
    if values.dtype.kind in "OUS":
        # only the last part of a file's path, which may be in a different folder on each machine
        texts = [
            each.decode(errors="replace") if isinstance(each, bytes) else str(each)
            for each in values.reshape(-1).tolist()
        ]
        return repr([text.rsplit("/", 1)[-1] for text in texts]).encode()
    return np.ascontiguousarray(values).tobytes()
