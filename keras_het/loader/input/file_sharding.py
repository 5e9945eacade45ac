"""Input of which each worker reads only its own files."""

from __future__ import annotations

import copy
import dataclasses
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_het.loader.input.data_pass import DataPass, Element, Weights
from keras_het.loader.input.distributed_steps import DistributedSteps
from keras_het.loader.input.step_iterator import Wrap
from keras_het.loader.nested import Batch
from keras_het.loader.order import rows
from keras_het.loader.order.pass_counter import Pass, advance, fresh_copy
from keras_het.planning.argument_checks import check_number, expect
from keras_het.planning.replica_layout import ReplicaLayout
from keras_het.planning.shares import assign_files, shares_of_own_samples


@dataclasses.dataclass(eq=False, kw_only=True)
class FilePass(DataPass):
    """A pass that takes as many of the worker's own samples as its share requires at each step."""

    chunks: Iterator[Batch] | None
    empty: Batch
    layout: ReplicaLayout
    weights: Weights
    global_batch_size: int
    remaining: list[int]

    def __post_init__(self) -> None:
        super().__post_init__()
        self._carry = self.empty

    def _produce(self) -> Element:
        if not any(self.remaining):
            raise StopIteration
        shares = _next_shares(self.layout, self.global_batch_size, self.weights(), self.remaining)
        local = self.layout.local_replicas
        sizes = shares[local.start : local.stop]
        own = self._take(sum(sizes))
        batches = rows.split_rows(own, tf.constant(sizes, tf.int64), len(sizes))
        return list(batches), np.asarray(shares, np.int64)

    def _take(self, count: int) -> Batch:
        parts, have = [self._carry], int(rows.count_rows(self._carry))
        while have < count:
            chunk = next(self.chunks or iter(()), None)
            if chunk is None:
                raise ValueError(
                    "A worker's files hold fewer samples than samples_per_file says: it needs "
                    f"{count - have} more. Give the right numbers, or leave samples_per_file out."
                )
            parts.append(chunk)
            have += int(rows.count_rows(chunk))
        joined = rows.concat_rows(parts)
        self._carry = rows.slice_rows(joined, count, have - count)
        return rows.slice_rows(joined, 0, count)

    def _free(self) -> None:
        self.chunks = None
        self._carry = self.empty


_logger = logging.getLogger(__name__)


class FileShardedDataset(DistributedSteps):
    """Whole files per worker, in proportion to its weight; it reads no others.

    Every sample is used exactly once per epoch and all workers have the same number of steps, but a
    global batch is not that of one process: it joins the next samples of each worker's files. Files
    are assigned once, by the weights at construction; a worker's samples differ from its ideal by
    at most as many as the largest file has. Shares follow the weights immediately at each step;
    when a worker runs out of samples, the others use up theirs in steps of the same size.

    Args:
        filenames: all files, in the same order on all workers.
        reader: makes a `tf.data.Dataset` of samples from a filename (string scalar).
        layout: all replicas, and which of them are local.
        weights: returns the current share weights, one for each replica; must return the same on
            all workers at the same step.
        wrap: makes an element from a list with the batch of each local replica, and sizes, int64 of
            shape [num_replicas].
        global_batch_size: samples in a step over all workers.
        samples_per_file: samples in each file. If None, each worker reads all files once to count
            them, which is slow.
        map_function: for a single sample, run in parallel by the worker that uses it.
        shuffle_buffer: samples in the buffer in which each worker shuffles its own, 0 for none.
        seed: seed of that shuffle.

    Raises:
        ValueError: if there is no file, or the numbers do not fit the files.
    """

    def __init__(
        self,
        filenames: Sequence[str],
        reader: Callable[[tf.Tensor], tf.data.Dataset],
        layout: ReplicaLayout,
        weights: Weights,
        wrap: Wrap,
        *,
        global_batch_size: int,
        samples_per_file: Sequence[int] | None = None,
        map_function: Callable[..., Any] | None = None,
        shuffle_buffer: int = 0,
        seed: int = 0,
    ) -> None:
        is_list = not isinstance(filenames, (str, bytes)) and isinstance(filenames, Sequence)
        are_names = is_list and all(isinstance(name, (str, os.PathLike)) for name in filenames)
        expect(are_names and len(filenames) > 0, "a list of paths of files", filenames=filenames)
        expect(callable(reader), "a function of a file's name", reader=reader)
        check_number("global_batch_size", global_batch_size, least=1, whole=True)
        is_function = map_function is None or callable(map_function)
        expect(is_function, "a function of a batch", map_function=map_function)
        check_number("shuffle_buffer", shuffle_buffer, least=0, whole=True)
        check_number("seed", seed, whole=True)
        counts = () if samples_per_file is None else samples_per_file
        is_list = isinstance(counts, (Sequence, np.ndarray)) and not isinstance(counts, str)
        expect(is_list, "a list with a number for each file", samples_per_file=samples_per_file)
        for number in counts:
            check_number("samples_per_file", number, least=0, whole=True)
        if samples_per_file is None:
            samples_per_file = _count_samples(filenames, reader)
        if len(samples_per_file) != len(filenames):
            raise ValueError(
                f"samples_per_file needs one number for each of the {len(filenames)} files. "
                f"Received: samples_per_file={samples_per_file!r}."
            )
        self._layout = layout
        self._weights = weights
        self._global_batch_size = global_batch_size
        by_replica = list(weights())
        of_workers = [layout.replicas_of(worker) for worker in range(layout.num_workers)]
        by_worker = [sum(by_replica[ids.start : ids.stop]) for ids in of_workers]
        self.files = assign_files(samples_per_file, by_worker)
        self._samples = [sum(samples_per_file[file] for file in files) for files in self.files]
        own = [filenames[file] for file in self.files[layout.worker_index]]
        self._map_function = map_function
        self._row_functions: tuple[Callable[..., Any], ...] = ()
        self._chunk = max(1, global_batch_size // layout.num_workers)
        self._own = _samples_of(own, reader)
        if shuffle_buffer:
            self._own = self._own.shuffle(shuffle_buffer, seed=seed + layout.worker_index)
        self._first = _samples_of(filenames, reader).take(1)
        chunks = self._chunks(self._first)
        self._empty = rows.slice_rows(next(iter(chunks)), 0, 0)
        steps = -(-sum(self._samples) // global_batch_size)
        super().__init__(rows.relax_rows(chunks.element_spec), steps, wrap)
        _logger.info("Input by files: worker %d reads %d.", layout.worker_index, len(own))

    def map(self, function: Callable[..., Any], **_: object) -> FileShardedDataset:
        """Return the same input with one more row-wise function of a batch.

        Keras's `fit` calls it for `class_weight`.

        Args:
            function: row i of its result must depend on row i of the batch only. Other arguments of
                `tf.data.Dataset.map` are accepted and ignored.
        """
        mapped = copy.copy(self)
        mapped._row_functions = (*self._row_functions, function)
        chunks = mapped._chunks(self._first)
        mapped._empty = rows.slice_rows(next(iter(chunks)), 0, 0)
        DistributedSteps.__init__(
            mapped,
            rows.relax_rows(chunks.element_spec),
            int(self._steps),
            self._wrap,
            passes=self._passes,
        )
        return mapped

    def prefetch(self, buffer_size: int) -> FileShardedDataset:
        """Return this input, which prepares the next samples whatever `buffer_size` is."""
        del buffer_size
        return self

    def _chunks(self, samples: tf.data.Dataset) -> tf.data.Dataset:
        if self._map_function is not None:
            samples = samples.map(
                self._map_function, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True
            )
        chunks = samples.batch(self._chunk)
        for function in self._row_functions:
            chunks = chunks.map(function)
        return chunks.prefetch(2)

    def _new_run(self, number: int, first_step: int) -> FilePass:
        remaining, own_skipped = self._after(first_step)
        return FilePass(
            chunks=iter(self._chunks(self._own.skip(own_skipped))),
            empty=self._empty,
            layout=self._layout,
            weights=self._weights,
            global_batch_size=self._global_batch_size,
            remaining=remaining,
            number=number,
            first_step=first_step,
            num_steps=int(self._steps),
        )

    def _after(self, steps: int) -> tuple[list[int], int]:
        """Samples left on each worker, and used on this one, after steps with today's weights."""
        remaining = list(self._samples)
        for _ in range(steps):
            _next_shares(self._layout, self._global_batch_size, self._weights(), remaining)
        mine = self._layout.worker_index
        return remaining, self._samples[mine] - remaining[mine]

    def _seek(self, passes: tuple[Pass, ...]) -> None:
        self._own = fresh_copy(self._own)
        advance(self._own, passes)

    def _ordered_data(self) -> tf.data.Dataset:
        return self._own


def _next_shares(
    layout: ReplicaLayout, samples: int, weights: Sequence[float], remaining: list[int]
) -> tuple[int, ...]:
    shares = shares_of_own_samples(samples, weights, layout.replicas_per_worker, remaining)
    for worker in range(layout.num_workers):
        ids = layout.replicas_of(worker)
        remaining[worker] -= sum(shares[ids.start : ids.stop])
    return shares


def _samples_of(
    filenames: Sequence[str], reader: Callable[[tf.Tensor], tf.data.Dataset]
) -> tf.data.Dataset:
    names = tf.constant(list(filenames), tf.string, shape=[len(filenames)])
    return tf.data.Dataset.from_tensor_slices(names).flat_map(reader)


def _count_samples(
    filenames: Sequence[str], reader: Callable[[tf.Tensor], tf.data.Dataset]
) -> list[int]:
    _logger.info("Reading %d files to count their samples.", len(filenames))
    counts = []
    for name in filenames:
        counted = reader(tf.constant(name)).reduce(tf.constant(0, tf.int64), lambda n, *_: n + 1)
        counts.append(int(counted))
    return counts
