"""Compute times of the latest steps, of all replicas, on every worker; read seldom if short."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import statistics
import time
import weakref
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_het.planning.replica_layout import ReplicaLayout
from keras_het.planning.shares import FloatArray, IntArray
from keras_het.strategy.measure.phase_times import PhaseTimes
from keras_het.strategy.measure.sampled_steps import SampledSteps

CAPACITY = 256
_ROWS = 8
# Reading and deciding takes about 0.3 ms of Python: 3 % of this.
LONG_STEP_SECONDS = 0.01
MOST_CALLS = 16
_MOST_STEPS = 64
_WARM_UP = 2.0


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """Measurements of one step."""

    shares: np.ndarray[Any, np.dtype[np.int64]]
    mean_shares: np.ndarray[Any, np.dtype[np.float64]]
    seconds: np.ndarray[Any, np.dtype[np.float64]]
    wanted_shares: np.ndarray[Any, np.dtype[np.int64]]
    fitting: np.ndarray[Any, np.dtype[np.int64]]
    gradient_squares: np.ndarray[Any, np.dtype[np.float64]]
    global_gradient_square: float
    collective_seconds: float = 0.0


# The shares that the chief wants travel with a step's sums: workers that decided for themselves
# could round differently, and cut a batch differently.
class ComputeTimes:
    """Ring of the latest steps in host memory, written by the train step."""

    def __init__(self, layout: ReplicaLayout, cuts: bool = False) -> None:
        self._num_replicas = num_replicas = layout.num_replicas
        self.phases = PhaseTimes(layout)
        self._read = 0
        self.num_lost = 0
        """Steps before those read last, in an execution that has more than the ring."""
        self.cuts = cuts
        """Whether shares that do not fit into memory are cut, see `fitting`."""
        self.is_measuring = False
        self.is_measuring_gradients = False
        self.is_sampled_out = False
        """Whether the step that runs now is one of those that are not measured."""
        # Models whose train function was made during measurement; whether with gradients.
        self._measured_models: weakref.WeakKeyDictionary[keras.Model, bool] = (
            weakref.WeakKeyDictionary()
        )
        self._keeps_measuring = False
        with tf.init_scope(), tf.device("CPU:0"):
            self._rows = tf.Variable(
                tf.zeros([CAPACITY, _ROWS, num_replicas], tf.float64), trainable=False
            )
            self._count = tf.Variable(0, trainable=False, dtype=tf.int64)
            # the shares that the chief wants, and what fits into the memory of own replicas
            self._to_tell = np.zeros([2, num_replicas], np.float32)
            self._told = tf.Variable(self._to_tell, trainable=False)

    def begin(
        self, model: keras.Model | None = None, gradients: bool = False, stops: bool = False
    ) -> None:
        """Make the training steps of Keras measure each replica's compute time."""
        # The step of a model that has been trained is traced again; `gradients` adds squared norms.
        gradients = gradients and self._num_replicas > 1
        self.is_measuring = True
        self.is_measuring_gradients |= gradients
        self._keeps_measuring |= not stops
        if model is None or self._measured_models.get(model, -1) >= gradients:
            return
        self._measured_models[model] = self.is_measuring_gradients
        if model.train_function is not None:
            model.make_train_function(force=True)

    def end(self, model: keras.Model) -> None:
        """End a measurement begun with `stops`, and that of gradients; others' times continue."""
        if self._keeps_measuring and not self.is_measuring_gradients:
            return
        self.is_measuring, self.is_measuring_gradients = self._keeps_measuring, False
        self._measured_models.pop(model, None)
        if self._keeps_measuring:
            self._measured_models[model] = False
        if model.train_function is not None:
            model.make_train_function(force=True)

    def send_shares(self, shares: Sequence[int]) -> None:
        """Tell all workers which shares they should use, zeros for no preference; for the chief."""
        self._tell(0, shares)

    def send_fitting(self, samples: IntArray) -> None:
        """Tell all workers how many samples fit into memory, see `MemoryUse`; 0 for others'."""
        self._tell(1, samples)

    def fitting(self, replica_id: int, most: int) -> tf.Tensor:
        """Return the most samples that a replica here computes at a time, in the graph."""
        with tf.device("CPU:0"):
            found = tf.cast(self._told[1, replica_id], tf.int32)
            return tf.where(found > 0, tf.minimum(found, most), most)

    def sizes_at_a_time(self, sizes: Sequence[int]) -> list[int]:
        """Return what this worker's replicas compute at a time, and `sizes` of the others."""
        found = self._to_tell[1].astype(int).tolist() if self.cuts else [0] * len(sizes)
        return [min(pair) if pair[1] > 0 else pair[0] for pair in zip(sizes, found, strict=True)]

    def _tell(self, row: int, samples: Sequence[int] | IntArray) -> None:
        self._to_tell[row] = samples
        self._told.assign(self._to_tell)

    def contribution(
        self,
        replica_id: int,
        sizes: tf.Tensor,
        seconds: tf.Tensor,
        gradient_square: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """Return what a replica adds to the sum over all replicas, in the graph."""
        believed = tf.cast(sizes, tf.float32) / self._num_replicas
        place = tf.one_hot(replica_id, self._num_replicas)
        with tf.device("CPU:0"):
            is_own = np.zeros([2, self._num_replicas], np.float32)
            is_own[0], is_own[1, replica_id] = replica_id == 0, 1
            told = self._told.read_value() * is_own
        rows = [believed, place * tf.cast(seconds, tf.float32)]
        squares = [] if gradient_square is None else [(place * gradient_square)[None]]
        return tf.concat([tf.stack(rows), told, *squares], axis=0)

    def record(
        self,
        sizes: tf.Tensor,
        summed: tf.Tensor,
        collective_seconds: tf.Tensor,
        global_gradient_square: tf.Tensor | None = None,
    ) -> None:
        """Write one step; called in the graph, by one local replica."""
        with tf.device("CPU:0"):
            rows = [tf.cast(sizes[None], tf.float64), tf.cast(summed, tf.float64)]
            if global_gradient_square is not None:
                square = tf.cast(global_gradient_square, tf.float64)
                rows.append(tf.fill([1, self._num_replicas], square))
            row = tf.concat(rows, axis=0)
            row = tf.pad(row, [[0, _ROWS - 1 - row.shape[0]], [0, 0]])
            collective = tf.cast(collective_seconds, tf.float64)
            row = tf.concat([row, tf.fill([1, self._num_replicas], collective)], axis=0)
            place = self._count % CAPACITY
            written = self._rows.scatter_nd_update([[place]], row[None])
            with tf.control_dependencies([written]):
                self._count.assign_add(1)

    def read_new(self) -> list[StepTimes]:
        """The steps since the last call, oldest first; at most the latest `CAPACITY`."""
        # operations, because the variables' methods take longer
        count = int(tf.raw_ops.ReadVariableOp(resource=self._count.handle, dtype=tf.int64))
        first = max(self._read, count - CAPACITY)
        self.num_lost, self._read = first - self._read, count
        return self._steps(first, count)

    def latest(self, number: int) -> list[StepTimes]:
        """The latest steps, oldest first; `read_new` still returns them."""
        count = int(tf.raw_ops.ReadVariableOp(resource=self._count.handle, dtype=tf.int64))
        return self._steps(max(0, count - min(number, CAPACITY)), count)

    def _steps(self, first: int, count: int) -> list[StepTimes]:
        if first == count:
            return []
        places = np.arange(first, count, dtype=np.int64) % CAPACITY
        rows = tf.raw_ops.ResourceGather(
            resource=self._rows.handle, indices=places, dtype=tf.float64
        )
        return [_step_times(row) for row in rows.numpy()]


def _step_times(row: np.ndarray) -> StepTimes:
    shares, mean_shares, seconds, wanted, fitting, squares, square, collective = row
    return StepTimes(
        shares.astype(np.int64),
        mean_shares,
        seconds,
        wanted.astype(np.int64),
        fitting.astype(np.int64),
        squares,
        float(square[0]),
        float(collective[0]),
    )


@dataclasses.dataclass(frozen=True)
class Reading:
    """Steps with the same shares that count as one: the last one, and their median times."""

    step: int
    shares: IntArray
    seconds: FloatArray
    wanted_shares: tuple[int, ...]
    fitting: tuple[int, ...]


# The interval between two readings depends only on compute times, identical bit by bit on all
# workers: all read, and change shares, after the same step. `step_seconds` of the steps read last
# is 0 if unknown, None where only some steps are measured.
class MeasuredSteps:
    """Record of the steps that a training measures."""

    def __init__(self, keep: int) -> None:
        self.rows: collections.deque[dict[str, Any]] = collections.deque(maxlen=keep)
        self.count = 0
        self.step_seconds: float | None = None
        self._first: list[StepTimes] = []
        self._times: ComputeTimes
        self._sampled: SampledSteps | None = None
        self._num_skipped = 0
        self._calls, self._interval = 0, 1
        self._latest_reading: float | None = None
        self.new_shares = NewShares()

    def begin(
        self, times: ComputeTimes, sampled: SampledSteps | None = None, num_unsettled: int = 0
    ) -> None:
        """Continue with the next step: those that nobody has read belong to another training."""
        self.new_shares.begin(num_unsettled)
        times.read_new()
        self._times, self._sampled, self._num_skipped = times, sampled, 0
        self._calls, self._interval = 0, 1

    def pause(self) -> None:
        """Leave out the time until the next reading: it belongs to a validation, not to a step."""
        self._latest_reading = None

    def is_due(self) -> bool:
        if self._sampled is not None:
            if not self._sampled.was_measured:
                self._num_skipped += self._sampled.latest_length
            return self._sampled.was_measured
        self._calls += 1
        return self._calls >= self._interval

    def read(self, is_last: bool = False) -> list[Reading]:
        """Return the steps since the last call, oldest first."""
        # The first step waits for the second, which shows whether it loaded kernels and memory.
        steps = self._times.read_new()
        if not steps:
            return []
        self.count += self._num_skipped + self._times.num_lost
        self._num_skipped = 0
        steps = [*self._first, *steps]
        if self.count == 0 and len(steps) < 2 and not is_last:
            self._first = steps
            return []
        self._first = []
        now, before = time.perf_counter(), self._latest_reading
        self._latest_reading = now
        if self._sampled is None:
            self.step_seconds = 0.0 if before is None else (now - before) / len(steps)
        warms_up = self.count == 0 and _is_warm_up(steps)
        readings = [self._reading(group) for group in self._groups(steps)]
        if warms_up:
            readings[0].seconds[:] = np.nan
        self._choose_interval(steps)
        return readings

    def _groups(self, steps: Sequence[StepTimes]) -> list[list[StepTimes]]:
        """Group short steps that were read together and had the same shares."""
        # Their median is less noisy than each, and costs a single decision.
        if self._interval == 1:
            return [[step] for step in steps]
        by_shares = itertools.groupby(steps, lambda step: step.shares.tobytes())
        return [list(group) for _, group in by_shares]

    def _reading(self, steps: Sequence[StepTimes]) -> Reading:
        shares = steps[-1].shares
        _check_same_shares(shares, np.mean([step.mean_shares for step in steps], axis=0))
        # A replica without a share computes a row of zeros: its time says nothing about samples.
        seconds = np.array([np.where(shares > 0, step.seconds, np.nan) for step in steps])
        for each in seconds:
            self.new_shares.leave_out(shares, each)
            row = {"step": self.count, "shares": shares.tolist(), "seconds": each.tolist()}
            self.rows.append(row)
            self.count += 1
        told = steps[-1].wanted_shares.tolist(), steps[-1].fitting.tolist()
        settled = seconds[~np.isnan(seconds[:, shares > 0]).any(axis=1)]
        middle = np.median(settled if len(settled) else seconds, axis=0)
        return Reading(self.count - 1, shares, middle, *map(tuple, told))

    def _choose_interval(self, steps: Sequence[StepTimes]) -> None:
        calls, self._calls = max(self._calls, 1), 0
        slowest = max(float(step.seconds.max()) for step in steps[-MOST_CALLS:])
        if slowest > 0:
            steps_each = max(len(steps) / calls, 1.0)
            wanted = math.ceil(LONG_STEP_SECONDS / slowest / steps_each)
            most = max(int(_MOST_STEPS / steps_each), 1)
            self._interval = max(1, min(wanted, MOST_CALLS, most))


def _is_warm_up(steps: Sequence[StepTimes]) -> bool:
    """Whether the first step took far longer than the second on all replicas."""
    if len(steps) < 2:
        return False
    first, second = steps[:2]
    used = (first.shares > 0) & (second.shares > 0)
    return bool((first.seconds[used] > _WARM_UP * second.seconds[used]).all())


def _check_same_shares(shares: IntArray, mean_shares: FloatArray) -> None:
    difference = np.abs(mean_shares - shares)
    if (difference > 1e-3 * np.maximum(shares, 1)).any():
        raise RuntimeError(
            "The workers cut the same global batch into different shares: samples were left out or "
            f"used twice. Received: shares {shares.tolist()} on this worker, "
            f"{mean_shares.round(2).tolist()} on average over all replicas. Use the same "
            "callbacks with the same arguments on every worker."
        )


_MOST_KEPT = 32


class NewShares:
    """What measured steps with a new share cost; their times say nothing about speed."""

    def __init__(self) -> None:
        self._num_unsettled = 0
        self._num_seen = collections.Counter[tuple[int, int]]()
        self._first: dict[int, int] = {}
        self._unsettled = collections.defaultdict[tuple[int, int], float](float)
        self._extra = collections.deque[float](maxlen=_MOST_KEPT)

    def begin(self, num_unsettled: int) -> None:
        """Begin a training in which so many measured steps of a new share say nothing."""
        self._num_unsettled = num_unsettled
        self._num_seen.clear()
        self._first.clear()
        self._unsettled.clear()

    @property
    def seconds(self) -> float:
        """Time that a new share takes more than a known one, the median; 0 if unknown."""
        return max(statistics.median(self._extra), 0.0) if self._extra else 0.0

    def leave_out(self, shares: IntArray, seconds: FloatArray) -> None:
        """Make times of a step unknown if they say nothing, and learn what they cost."""
        for replica, share in enumerate(shares.tolist() if self._num_unsettled else ()):
            new = replica, share
            first = self._first.setdefault(replica, share)
            self._num_seen[new] += 1
            if self._num_seen[new] <= self._num_unsettled:
                self._unsettled[new] += float(seconds[replica])
                seconds[replica] = np.nan
            elif new in self._unsettled:
                settled = self._num_unsettled * float(seconds[replica])
                extra = self._unsettled.pop(new) - settled
                if share and share != first:  # the first one loads kernels and memory, too
                    self._extra.append(extra)
