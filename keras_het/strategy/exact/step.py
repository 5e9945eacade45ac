r"""Knowledge of one replica while its Keras step is traced.

One device would take the mean over the B samples of the global batch. Replica i holds
:math:`b_i` of them, computes on its own share what one device would compute on it, and every
quantity that leaves the replica is combined as

.. math:: \bar q = \sum_i w_i q_i, \qquad w_i = b_i / B,

which is the one device's mean, whatever the shares. A quantity that is not a mean over samples (a
loss with reduction "sum", a mean over unmasked time steps) is first brought into that form, see
`losses`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from keras_het.strategy.batches.packed_tensors import PackedTensors
from keras_het.strategy.measure.emulated_device_config import EmulatedDevice
from keras_het.strategy.measure.step_clock import StepClock
from keras_het.value_types import EitherVariable, Leaf, Nest, Summand

if TYPE_CHECKING:
    from keras_het.strategy.cluster.unfinished_step import UnfinishedStep
    from keras_het.strategy.exact.gradients import PendingUpdate

_local = threading.local()


class ExactStep:
    """The shares of one replica's step, and what the step has done so far."""

    def __init__(self, replica_id: int, samples: tf.Tensor, total: tf.Tensor) -> None:
        self.replica_id = replica_id
        # The independent stream of random numbers that this replica draws from.
        self.seed_stream = replica_id
        self.samples = samples
        self.total = total
        # float64, so a float64 model loses no precision; cast to each value's own type
        samples, total = tf.cast(samples, tf.float64), tf.cast(total, tf.float64)
        # The replicas that this one is reduced with; not all of them in local training.
        self.num_replicas = 1
        self.position = 0  # of this one among them
        # The replicas of this process, and the graph from which they can be reached.
        self.num_local_replicas = 1
        self.graph = tf.compat.v1.get_default_graph()
        # Ids of the values of the model's variables: equal on all replicas after each step.
        self.values_of_model: set[int] = set()
        self.is_on_gpu = False  # or on another device that works asynchronously to its host
        # A worker that trains locally may have no samples at all: it then takes no step.
        self.may_have_no_samples = False
        self.state_before: dict[int, tf.Tensor] = {}
        self.weight = tf.math.divide_no_nan(samples, total)
        self.inverse_weight = tf.math.divide_no_nan(total, samples)
        # Shares of all replicas, int64 of shape [num_replicas], if the batch carries them.
        self.sizes: tf.Tensor | None = None
        # Times this replica's computation, if needed.
        self.clock: StepClock | None = None
        self.is_measured = False
        # Outputs of a predict step belong to single samples: none of them is weighted.
        self.is_prediction = False
        # Set for an emulated device only.
        self.emulated_device: EmulatedDevice | None = None
        self.waited: tf.Tensor | None = None
        # Optimizers whose loss already carries the weight, by id.
        self.weighted_optimizers: set[int] = set()
        self.is_scaling_loss = False
        self.is_keras_step = False  # Keras's own train step, with or without Keras's own metrics
        self.gradients_are_reduced = False
        # Where this replica's step is one that another thread may have to save the state of.
        self.unfinished: UnfinishedStep | None = None
        self.is_computing_results = False
        # Keras's own train step and metrics read no weight after the update of this optimizer,
        # which may then wait until they are known, so that both travel in one collective.
        self.deferrable_optimizer: keras.optimizers.Optimizer | None = None
        self.pending_update: PendingUpdate | None = None
        # Squared norms of this replica's own mean gradient and of the global one, on request.
        self.wants_gradient_squares = False
        self.gradient_square: tf.Tensor | None = None
        self.global_gradient_square: tf.Tensor | None = None
        # Variable id to the variable and the values that the step has assigned to it, in order.
        self.assigned_variables: dict[int, tuple[EitherVariable, list[Leaf]]] = {}
        self.is_assigning = False  # a Keras variable, or one of keras_het
        # The batch (nested structure), tensors that are equal on all replicas, and tensors that
        # differ although no sample affects them: the starting points of `SampleDependence`.
        self.rows: Nest = ()
        self.reduced: list[Summand] = []
        self.own_seeds: list[tf.Tensor] = []
        # What the user should know about the step.
        self.remarks: list[str] = []
        # Tensor id to the tensor itself and the metric whose result it is.
        self.metric_results: dict[int, Any] = {}
        self.metric_state_before: dict[int, tf.Tensor] = {}

    @property
    def loss_is_weighted(self) -> bool:
        """Whether the gradients on the tape carry the weight."""
        return bool(self.weighted_optimizers)

    @contextlib.contextmanager
    def active(self) -> Iterator[ExactStep]:
        """Make this the step of the running thread (TensorFlow traces one replica per thread)."""
        previous = running_step()
        _local.step = self
        try:
            yield self
        finally:
            _local.step = previous

    @contextlib.contextmanager
    def assigning(self) -> Iterator[None]:
        """Tell assignments of Keras and keras_het from those of the user to plain variables."""
        before, self.is_assigning = self.is_assigning, True
        try:
            yield
        finally:
            self.is_assigning = before

    def all_reduce_sum(
        self, values: Nest, prepare: Callable[[tf.Tensor], tf.Tensor] | None = None
    ) -> Nest:
        """Sum a structure of tensors over all replicas, in one collective per element type.

        No gradient flows through it.
        """
        flat = tf.nest.flatten(values)
        if not flat:
            return values
        packed = PackedTensors(flat)
        buffers = packed.buffers if prepare is None else [prepare(b) for b in packed.buffers]
        sparse = [item for item in flat if isinstance(item, tf.IndexedSlices)]
        summands = [*buffers, *sparse]
        if self.clock:
            started, summands = self.clock.collective_starts(summands)
        extended = tf.distribute.get_strategy().extended
        with self.assigning():  # a summation counts
            reduced = extended.all_reduce_in_replica(tf.distribute.ReduceOp.SUM, summands)
        if self.clock:
            self.clock.collective_ends(started, reduced)
        self.reduced += reduced
        dense = iter(packed.unpack(reduced[: len(buffers)]))
        slices = iter(reduced[len(buffers) :])
        result = [
            next(slices) if isinstance(item, tf.IndexedSlices) else next(dense) for item in flat
        ]
        return tf.nest.pack_sequence_as(values, result)

    def of_first_replica(self, value: tf.Tensor) -> tf.Tensor:
        """Return the value on the first replica with samples, and zero on the others."""
        is_first: tf.Tensor | bool = self.position == 0
        if self.sizes is not None:
            start = self.replica_id - self.position
            sizes = self.sizes[start : start + self.num_replicas]
            is_first = tf.argmax(tf.cast(sizes > 0, tf.int32)) == self.position
        return tf.where(is_first, value, tf.zeros_like(value))

    def weighted(self, value: Summand) -> Summand:
        """Return `weight * value`, and zero on a replica without samples (even for NaN)."""
        if isinstance(value, tf.IndexedSlices):
            return tf.IndexedSlices(self.weighted(value.values), value.indices, value.dense_shape)
        return tf.math.multiply_no_nan(value, tf.cast(self.weight, value.dtype))


def current_step() -> ExactStep | None:
    """Return the train or test step that the running thread is tracing, or None outside of one."""
    step = running_step()
    return None if step is None or step.is_prediction else step


def running_step() -> ExactStep | None:
    """Return the step that the running thread is tracing, predictions included, or None."""
    return getattr(_local, "step", None)
