"""One pass over a worker's own files, cut into batches whose sizes are decided at each step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_het.loader.input.data_pass import DataPass, Element
from keras_het.loader.input.pipeline_pass import Weights
from keras_het.loader.order import rows
from keras_het.planning.file_assignment import shares_of_own_samples
from keras_het.planning.replica_layout import ReplicaLayout


class FilePass(DataPass):
    """Takes as many of the worker's own samples as its share says at each step.

    Args:
        chunks: batches of a few of the worker's own samples, in order.
        empty: a batch of 0 rows.
        layout: which replicas there are, and which are local.
        weights: current share weights, one for each replica; read once a step.
        global_batch_size: samples in a full step over all workers.
        remaining: samples that each worker has left in this pass.
        number: number of passes before this one.
        first_step: steps of this pass that are left out.
        num_steps: steps of a whole pass.
    """

    def __init__(
        self,
        chunks: Iterator[Any],
        empty: Any,
        layout: ReplicaLayout,
        weights: Weights,
        global_batch_size: int,
        remaining: Sequence[int],
        *,
        number: int,
        first_step: int,
        num_steps: int,
    ) -> None:
        super().__init__(number, first_step, num_steps)
        self._chunks: Iterator[Any] | None = chunks
        self._empty = empty
        self._layout = layout
        self._weights = weights
        self._global_batch_size = global_batch_size
        self._remaining = list(remaining)
        self._carry: Any = empty

    def _produce(self) -> Element:
        if not any(self._remaining):
            raise StopIteration
        counts = self._layout.replicas_per_worker
        shares = shares_of_own_samples(
            self._global_batch_size, self._weights(), counts, self._remaining
        )
        for worker in range(self._layout.num_workers):
            of_worker = self._layout.replicas_of(worker)
            self._remaining[worker] -= sum(shares[of_worker.start : of_worker.stop])
        local = self._layout.local_replicas
        sizes = shares[local.start : local.stop]
        own = self._take(sum(sizes))
        batches = rows.split_rows(own, tf.constant(sizes, tf.int64), len(sizes))
        return list(batches), np.asarray(shares, np.int64)

    def _take(self, count: int) -> Any:
        parts, have = [self._carry], int(rows.count_rows(self._carry))
        while have < count:
            chunk = next(self._chunks or iter(()), None)
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
        self._chunks = None
        self._carry = self._empty
