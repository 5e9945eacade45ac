"""Where the time of each step goes on each replica, for all workers to know.

A step lasts from the end of the collective of the step before to the end of its own. A replica
knows its parts only then, so they travel with the sums of the step after: no step has another
collective than without measurement.
"""

from __future__ import annotations

import time
import weakref

import keras
import numpy as np
import tensorflow as tf

from keras_het.strategy.measure.step_clock import StepClock

CAPACITY = 2048
PARTS = 5
"""Compute time, input wait, sync wait, the rest (seconds); share (samples)."""
_UNKNOWN = -1.0


class PhaseTimes:
    """Ring of the latest steps in host memory, written by the train step.

    Args:
        num_replicas: replicas over all workers.
        num_local_replicas: those of this worker.

    Attributes:
        is_measuring: whether the train steps that are traced now measure.
    """

    def __init__(self, num_replicas: int, num_local_replicas: int) -> None:
        self._num_replicas, self._num_local = num_replicas, num_local_replicas
        self.is_measuring = False
        self._measured: weakref.WeakSet[keras.Model] = weakref.WeakSet()
        self._sampled = 0
        self._read = 0

    def begin(self, model: keras.Model, sampled: int = 0) -> None:
        """Make a model's training steps measure from now on; every worker must call it.

        Args:
            model: the model; its step is retraced if it exists already.
            sampled: quantities for `send_samples`, the same number in each call.
        """
        if not self.is_measuring:
            self._sampled, self.is_measuring = sampled, True
            self._create_variables()
        if model in self._measured:
            return
        self._measured.add(model)
        if model.train_function is not None:
            model.make_train_function(force=True)

    def _create_variables(self) -> None:
        with tf.init_scope(), tf.device("CPU:0"):

            def variable(*shape: int, dtype: tf.DType = tf.float32) -> tf.Variable:
                return tf.Variable(tf.zeros(shape, dtype), trainable=False)

            # of this worker's replicas: the parts of the latest step, and the time of its end
            self._own = [variable(PARTS) for _ in range(self._num_local)]
            self._ends = [variable(dtype=tf.float64) for _ in range(self._num_local)]
            self._input_wait = variable()
            self._samples = variable(self._num_local, self._sampled)
            # of all replicas
            self._rows = variable(CAPACITY, PARTS, self._num_replicas)
            self._latest_samples = variable(self._sampled, self._num_replicas)
            self._count = variable(dtype=tf.int64)

    def restart_clock(self) -> None:
        """Exclude the time since the latest step: a validation is not a part of the next one."""
        for end in self._ends if self.is_measuring else ():
            end.assign(time.time())

    def note_input_wait(self, seconds: float) -> None:
        """Note how long this worker waited for the batch of the step that begins.

        Args:
            seconds: the time.
        """
        if self.is_measuring:
            tf.raw_ops.AssignVariableOp(
                resource=self._input_wait.handle, value=tf.constant(seconds, tf.float32)
            )

    def send_samples(self, samples: np.ndarray) -> None:
        """Let the next steps tell all workers what was sampled on this one.

        Args:
            samples: float32 of shape [num_local_replicas, sampled], zero or more; NaN if unknown.
        """
        self._samples.assign(np.where(np.isnan(samples), _UNKNOWN, samples))

    def contribution(self, replica_id: int, position: int) -> tf.Tensor:
        """Return what a replica adds to the sum over all replicas, in the graph.

        Args:
            replica_id: id of the replica.
            position: its index among this worker's replicas.

        Returns:
            Float32 of shape [PARTS + sampled, num_replicas]: the parts of the step before, and
            samples.
        """
        with tf.device("CPU:0"):
            samples = self._samples.read_value()[position]
            column = tf.concat([self._own[position].read_value(), samples], 0)
            behind = self._num_replicas - replica_id - 1
            # no product with zeros: a value that is not finite stays this replica's own
            return tf.pad(column[:, None], [[0, 0], [replica_id, behind]])

    def finish_step(
        self, position: int, samples: tf.Tensor, clock: StepClock, results: list[tf.Tensor]
    ) -> None:
        """Note the parts of a replica's step when its collective has ended; in the graph.

        Args:
            position: index of the replica among this worker's.
            samples: its share, int64 scalar.
            clock: the clock of its step.
            results: what it received from the collective.
        """
        with tf.device("CPU:0"):
            end = clock.time_when_ready(results)
            before = self._ends[position].read_value()
            waited = tf.cast(self._input_wait.read_value(), tf.float64)
            compute, sync = clock.seconds, clock.seconds_in_collectives()
            rest = tf.maximum(end - before - compute - sync - waited, 0)
            rest = tf.where(before > 0, rest, 0)
            parts = [compute, waited, sync, rest, tf.cast(samples, tf.float64)]
            self._own[position].assign(tf.cast(tf.stack(parts), tf.float32))
            self._ends[position].assign(end)

    def record(self, summed: tf.Tensor) -> None:
        """Write the step before; called in the graph, by one local replica.

        Args:
            summed: the sum of all contributions.
        """
        with tf.device("CPU:0"):
            place = self._count % CAPACITY
            written = self._rows.scatter_nd_update([[place]], summed[None, :PARTS])
            self._latest_samples.assign(summed[PARTS:])
            with tf.control_dependencies([written]):
                self._count.assign_add(1)

    @property
    def count(self) -> int:
        """Number of steps so far; the parts of the latest are not known yet."""
        return int(tf.raw_ops.ReadVariableOp(resource=self._count.handle, dtype=tf.int64))

    def read_new(self) -> tuple[int, np.ndarray]:
        """The steps since the last call, oldest first; at most the latest `CAPACITY`.

        Returns:
            The number of the first of them, counted from 0; float32 of shape [steps, PARTS,
            num_replicas].
        """
        # row k has the step before the one that wrote it: row 0 has none
        count = self.count
        first, self._read = max(self._read, count - CAPACITY, 1), max(count, 1)
        places = np.arange(first, max(count, first), dtype=np.int64) % CAPACITY
        rows = tf.raw_ops.ResourceGather(
            resource=self._rows.handle, indices=places, dtype=tf.float32
        )
        return first - 1, rows.numpy()

    def samples(self) -> np.ndarray:
        """What was sampled last on all workers, float32 of shape [num_replicas, sampled]."""
        samples = self._latest_samples.numpy().T
        return np.where(samples == _UNKNOWN, np.nan, samples)
