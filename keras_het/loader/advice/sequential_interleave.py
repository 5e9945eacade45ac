"""Detection of files that are read one after the other."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import tensorflow as tf

from keras_het.loader import tf_data_adapter as adapter
from keras_het.loader.advice import nodes
from keras_het.loader.advice.advice import SEQUENTIAL_INTERLEAVE, Advice
from keras_het.loader.advice.examination import Examination
from keras_het.loader.advice.rebuilding import interleaved

Dataset = adapter.Dataset
_CYCLE = 8


def find(examination: Examination) -> list[Advice]:
    """Advise parallel reads if they are faster.

    Looks at `interleave` without `num_parallel_calls`, at `flat_map` over files and at
    `TFRecordDataset` of several files without `num_parallel_reads`.
    """
    found = []
    for node, _ in examination.all_nodes():
        parallel = examination.quietly(partial(_parallel, node))
        if parallel is None:
            continue
        gain = examination.gain_of(node, parallel[0])
        if gain is not None:
            found.append(
                Advice(
                    SEQUENTIAL_INTERLEAVE,
                    nodes.label(node),
                    parallel[1],
                    gain.ratio,
                    gain.is_measured,
                )
            )
    return found


def _parallel(node: Dataset) -> tuple[Dataset, str] | None:
    """Return the parallel form of an operation and what to write; None for other operations."""
    kind = nodes.kind(node)
    if kind == "Interleave":
        (source,) = adapter.inputs_of(node)
        text = "Give interleave num_parallel_calls=tf.data.AUTOTUNE: the order stays the same."
        return interleaved(node, source, tf.data.AUTOTUNE), text
    if kind == "FlatMap" and not adapter.draws_from_generator(node) and nodes.is_file_reader(node):
        (source,) = adapter.inputs_of(node)
        text = (
            "Read several files at once: interleave(..., num_parallel_calls=tf.data.AUTOTUNE) "
            "in the place of flat_map. Samples of the files then alternate."
        )
        return _interleave(source, nodes.python_function(node)), text
    if kind == "TFRecord" and node._num_parallel_reads is None:
        files = node._filenames
        if int(files.cardinality()) in (0, 1):
            return None
        compression = tf.get_static_value(node._compression_type) or b""

        def read(name: tf.Tensor) -> tf.data.Dataset:
            return tf.data.TFRecordDataset(name, compression.decode())

        text = "Give TFRecordDataset num_parallel_reads: records of the files then alternate."
        return _interleave(files, read), text
    return None


def _interleave(files: Dataset, read: Callable[..., Dataset] | None) -> Dataset:
    return files.interleave(read, cycle_length=_CYCLE, num_parallel_calls=tf.data.AUTOTUNE)
