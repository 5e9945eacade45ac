"""Where the time of each step goes on each replica, known to all workers.

A step lasts from the end of the collective of the step before to its own end. A replica
knows its parts only then, so they travel with the sums of the step after. Where only some steps are
measured, one stands for itself and the plain ones before it: all together last as long as they did.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from keras_het.planning.replica_layout import ReplicaLayout

CAPACITY = 2048
PARTS = 5
"""Compute time, input wait, sync wait, the rest (seconds); share (samples)."""
_INPUT, _REST = 1, 3
_UNKNOWN = -1.0
# A longer step is the time since 1970: its replica had none before.
_LONGEST_SECONDS = 1e8


# The graph only notes what it alone knows: a step's wall time becomes the rest when it is read.
class PhaseTimes:
    """Ring of the latest steps in host memory, written by the train step."""

    def __init__(self, layout: ReplicaLayout) -> None:
        self.layout, self._num_replicas = layout, layout.num_replicas
        self.devices: tuple[str, ...] = ()
        self.stages = 1
        self.is_measuring = False
        self._measured: weakref.WeakSet[keras.Model] = weakref.WeakSet()
        self._sampled = 0
        self._read = 0
        self._num_steps: int | None = None
        """Steps so far where only some are measured, else None."""
        # Of measured steps by their number among these: the first step that one stands for, how
        # many these are, and how many of them since the clock was restarted.
        self._windows: dict[int, tuple[int, int, int]] = {}
        self._num_measured = self._window_start = self._clock_start = 0

    def begin(
        self,
        model: keras.Model,
        devices: Sequence[str],
        sampled: int = 0,
        host: str | None = None,
    ) -> None:
        """Make a model's training steps measure from now on; every worker must call it."""
        if not self.is_measuring:
            self._sampled, self.is_measuring = sampled, True
            self.devices = tuple(devices)
            # where a replica's times are measured and kept
            self._hosts = [host or (d if "CPU" in d else "CPU:0") for d in devices]
            self._create_variables()
        if model in self._measured:
            return
        self._measured.add(model)
        if model.train_function is not None:
            model.make_train_function(force=True)

    def _create_variables(self) -> None:
        def variable(host: str, *shape: int, dtype: tf.DType = tf.float32) -> tf.Variable:
            with tf.device(host):
                return tf.Variable(tf.zeros(shape, dtype), trainable=False)

        first, width = self._hosts[0], PARTS + self._sampled
        with tf.init_scope():
            # of this worker's replicas: the parts of the latest step, and the time of its end
            self._own = [variable(host, PARTS) for host in self._hosts]
            self._ends = [variable(host, dtype=tf.float64) for host in self._hosts]
            self._input_wait = variable(first, 2, dtype=tf.float64)  # of the next step, of others
            self._samples = variable(first, len(self._hosts) * self._sampled)
            # of all replicas
            self._rows = variable(first, CAPACITY, width * self._num_replicas)
            self._count = variable(first, dtype=tf.int64)

    def count_steps(self, number: int, are_measured: bool) -> None:
        """Count steps of which only some are measured, after each execution."""
        if self._num_steps is None:
            self._num_measured = self._num_steps = self._num_rows - number * are_measured
            self._window_start = self._clock_start = self._num_steps
        if not are_measured:
            self._num_steps += number
            return
        for _ in range(number):
            self._num_steps, start = self._num_steps + 1, self._window_start
            since_restart = self._num_steps - max(start, self._clock_start)
            self._windows[self._num_measured] = (start, self._num_steps - start, since_restart)
            self._windows.pop(self._num_measured - CAPACITY, None)
            self._num_measured, self._window_start = self._num_measured + 1, self._num_steps

    def restart_clock(self) -> float:
        """Exclude the time since the latest step: a validation is not a part of the next one."""
        now = time.time()
        seconds = now - float(self._ends[0].numpy()) if self.is_measuring else 0.0
        for end in self._ends if self.is_measuring else ():
            end.assign(now)
        self._clock_start = self._num_steps or 0
        return max(seconds, 0.0)

    def note_input_wait(self, seconds: float, of_each_later: float = 0.0) -> None:
        """Note how long this worker waited for the batches of the step that begins."""
        # Later steps of the same execution, whose batches are there, wait `of_each_later`.
        if self.is_measuring:
            # an operation, because the variable's method takes longer
            waits = np.array([seconds, of_each_later])
            tf.raw_ops.AssignVariableOp(resource=self._input_wait.handle, value=waits)

    def send_samples(self, samples: np.ndarray) -> None:
        """Let the next steps tell all workers what was sampled on this one."""
        self._samples.assign(np.where(np.isnan(samples), _UNKNOWN, samples).ravel())

    def contribution(self, replica_id: int, position: int) -> tf.Tensor:
        """Return what a replica adds to the sum over all replicas, in the graph."""
        behind = PARTS * (self._num_replicas - replica_id - 1)
        with tf.device(self._hosts[position]):
            pieces = [tf.zeros(PARTS * replica_id), self._own[position].value()]
            if position:
                pieces.append(tf.zeros(behind + self._sampled * self._num_replicas))
            else:
                after = self._num_replicas - replica_id - len(self._hosts)
                pieces += [
                    tf.zeros(behind + self._sampled * replica_id),
                    self._samples.value(),
                    tf.zeros(self._sampled * after),
                ]
            return tf.concat(pieces, 0)

    def finish_step(
        self,
        position: int,
        samples: tf.Tensor,
        compute: tf.Tensor,
        sync: tf.Tensor,
        end: tf.Tensor,
    ) -> None:
        """Note the parts of a replica's step when its collective has ended; in the graph."""
        with tf.device(self._hosts[position]):
            wall = end - self._ends[position].value()
            # one variable for a worker, which is on the device of its first replica
            waited = 0.0 if position else self._input_wait.value()[0]
            share = tf.cast(samples, tf.float64)
            parts = tf.stack([compute, waited, sync, wall, share])
            self._own[position].assign(tf.cast(parts, tf.float32), read_value=False)
            self._ends[position].assign(end, read_value=False)
            if not position:
                later = self._input_wait.value()[1]
                self._input_wait.assign(tf.stack([later, later]), read_value=False)

    def record(self, summed: tf.Tensor) -> None:
        """Write the step before; called in the graph, by the first local replica."""
        with tf.device(self._hosts[0]):
            place = self._count.value() % CAPACITY
            written = self._rows.scatter_update(tf.IndexedSlices(summed, place))
            with tf.control_dependencies([written]):
                self._count.assign_add(1, read_value=False)

    def latest_step(self) -> tf.Tensor:
        """Number of the step that `record` writes next, int64 scalar; in the graph."""
        return self._count.value() - 1

    @property
    def count(self) -> int:
        """Number of steps so far; the parts of the latest are not known yet."""
        return self._num_rows if self._num_steps is None else self._num_steps

    @property
    def is_sampled(self) -> bool:
        """Whether only some steps are measured."""
        return self._num_steps is not None

    @property
    def _num_rows(self) -> int:
        return int(tf.raw_ops.ReadVariableOp(resource=self._count.handle, dtype=tf.int64))

    def read_new(self) -> tuple[int, np.ndarray, np.ndarray]:
        """The steps since the last call, oldest first, and which of them were measured."""
        # row k has the step before the one that wrote it: row 0 has none
        count = self._num_rows
        first, self._read = max(self._read, count - CAPACITY, 1), max(count, 1)
        rows = self._gather(np.arange(first, max(count, first)))[:, : PARTS * self._num_replicas]
        parts = rows.reshape(len(rows), self._num_replicas, PARTS).transpose(0, 2, 1)
        counts = self.layout.replicas_per_worker
        parts[:, _INPUT] = parts[:, _INPUT, np.repeat(np.cumsum((0, *counts[:-1])), counts)]
        known = range(first - 1, first - 1 + len(rows))
        windows = np.array([self._windows.get(each, (each, 1, 1)) for each in known], np.int64)
        wall = parts[:, _REST]
        is_known = wall < _LONGEST_SECONDS
        if self._num_steps is not None and len(rows):
            wall = wall / windows[:, 2:]
            # a measured step lasts longer than those that it stands for
            most = wall / np.maximum(parts[:, :_REST].sum(axis=1), 1e-12)
            parts[:, :_REST] *= np.where(is_known, np.minimum(most, 1), 1)[:, None]
        rest = np.maximum(wall - parts[:, :_REST].sum(axis=1), 0)
        parts[:, _REST] = np.where(is_known, rest, 0)
        if self._num_steps is None or not len(rows):
            return first - 1, parts, np.ones(len(parts), bool)
        stand_for = windows[:, 1]
        measured = np.zeros(stand_for.sum(), bool)
        measured[np.cumsum(stand_for) - 1] = True
        return int(windows[0, 0]), np.repeat(parts, stand_for, axis=0), measured

    def samples(self) -> np.ndarray:
        """What was sampled last on all workers, float32 of shape [num_replicas, sampled]."""
        (row,) = self._gather(np.array([self._num_rows - 1]))
        samples = row[PARTS * self._num_replicas :].reshape(self._num_replicas, self._sampled)
        return np.where(samples == _UNKNOWN, np.nan, samples)

    def _gather(self, numbers: np.ndarray) -> np.ndarray:
        places = numbers.astype(np.int64) % CAPACITY
        rows = tf.raw_ops.ResourceGather(
            resource=self._rows.handle, indices=places, dtype=tf.float32
        )
        return rows.numpy()
