r"""One replica's Keras step while it is traced: what it is, and its sums over replicas.

One device would take the mean over the B samples of the global batch. Replica i holds
:math:`b_i` of them, computes on its own share what one device would compute on it, and every
quantity that leaves the replica is combined as

.. math:: \bar q = \sum_i w_i q_i, \qquad w_i = b_i / B,

which is the one device's mean, whatever the shares. A quantity that is not a mean over samples (a
loss with reduction "sum", a mean over unmasked time steps) is first brought into that form, see
`means`.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import keras
import tensorflow as tf

from keras_het.strategy.measure.emulated_device import EmulatedDevice
from keras_het.value_types import Nest, Summand

if TYPE_CHECKING:
    from keras_het.strategy.exact.keras_step import ExactStep
    from keras_het.strategy.exact.micro_batches import MicroBatches
    from keras_het.strategy.exact.own_state import Assignments
    from keras_het.strategy.measure.step_clock import Measurement

Original: TypeAlias = Callable[..., Any]
"""The function of Keras or TensorFlow that a hook replaces."""
Join: TypeAlias = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
"""How what two micro-batches add to a sum over replicas becomes one."""
_local = threading.local()
# One transfer of so many bytes is as fast as a part of a larger one.
_BYTES_TO_TRAVEL_ALONE = 2**22
# What is packed exists twice until it is sent.
_BYTES_OF_A_BUFFER = 2**25


def travels_alone(value: Summand) -> bool:
    """Whether a tensor is large: to pack it with others would only copy it, there and back."""
    if isinstance(value, tf.IndexedSlices):
        return False
    size = value.shape.num_elements()
    return size is not None and size * value.dtype.size >= _BYTES_TO_TRAVEL_ALONE


@dataclasses.dataclass(frozen=True)
class StepSpec:
    """Which step of which replica is traced; nothing of it changes meanwhile."""

    kind: Literal["train", "test", "predict"]
    replica_id: int
    group: range
    """The replicas that this one is reduced with; not all of them in local training."""
    local_replicas: range
    samples: tf.Tensor
    total: tf.Tensor
    has_samples: tf.Tensor
    weight: tf.Tensor
    """float64, so that a float64 model loses no precision; cast to each value's own type."""
    inverse_weight: tf.Tensor
    sizes: tf.Tensor | None
    """Shares of all replicas, int64 of shape [num_replicas], if the batch carries them."""
    seed_stream: int | tf.Tensor
    """The independent stream of random numbers that this replica draws from."""
    device: str
    is_on_gpu: bool
    """Whether it is on a GPU or another device that works asynchronously to its host."""
    may_have_no_samples: bool
    """Whether all of the group may be without samples: then it takes no step."""
    is_keras_step: bool = False
    """Whether it is Keras's own train step, with or without Keras's own metrics."""
    deferrable_optimizer: keras.optimizers.Optimizer | None = None
    """The optimizer whose gradients travel with the logs, as nothing reads weights in between."""
    is_timed: bool = False
    emulated_device: EmulatedDevice | None = None
    parts: MicroBatches | None = None
    """The micro-batches that this replica's share is computed in."""
    is_first_part: bool = True

    @property
    def is_whole(self) -> bool:
        """Whether it computes on the whole global batch."""
        return self.num_replicas == 1 and self.parts is None

    @property
    def num_replicas(self) -> int:
        return len(self.group)

    @property
    def position(self) -> int:
        return self.replica_id - self.group.start

    @property
    def local_position(self) -> int:
        """This replica's place in its process; the first one writes what a process keeps."""
        return self.replica_id - self.local_replicas.start

    def weighted(self, value: Summand) -> Summand:
        """Return `weight * value`, and zero on a replica without samples (even for NaN)."""
        if isinstance(value, tf.IndexedSlices):
            return tf.IndexedSlices(self.weighted(value.values), value.indices, value.dense_shape)
        return tf.math.multiply_no_nan(value, tf.cast(self.weight, value.dtype))

    def or_zero(self, value: tf.Tensor) -> tf.Tensor:
        return tf.where(self.has_samples, value, tf.zeros_like(value))

    def on_first_replica(self, value: tf.Tensor) -> tf.Tensor:
        """Return the value on the first replica with samples, and zero on the others."""
        is_first: tf.Tensor | bool = self.position == 0
        if self.sizes is not None:
            sizes = self.sizes[self.group.start : self.group.stop]
            is_first = tf.argmax(tf.cast(sizes > 0, tf.int32)) == self.position
        if not self.is_first_part:
            is_first = False
        return tf.where(is_first, value, tf.zeros_like(value))


def is_positive(number: tf.Tensor) -> tf.Tensor:
    """Compare a number of samples on the host, where a step chooses between branches."""
    # GPUs leave 32-bit integers to their host; a copy of what they compare would wait for all
    # steps.
    with tf.device("CPU:0"):
        small = tf.cast(number, tf.int32)
    return small > 0


@contextlib.contextmanager
def active(step: ExactStep) -> Iterator[None]:
    """Make a step that of the running thread (TensorFlow traces one replica per thread)."""
    previous = running_step()
    _local.step = step
    try:
        yield
    finally:
        _local.step = previous


def current_step() -> ExactStep | None:
    """Return the train or test step that the running thread is tracing, or None outside of one."""
    step = running_step()
    return None if step is None or step.spec.kind == "predict" else step


def running_step() -> ExactStep | None:
    """Return the step that the running thread is tracing, predictions included, or None."""
    return getattr(_local, "step", None)


# No gradient flows through them.
class ReplicaSum:
    """Sums over the replicas of a step: few collectives per element type, one per large tensor."""

    def __init__(
        self, spec: StepSpec, assignments: Assignments, measurement: Measurement | None
    ) -> None:
        self._spec, self._assignments, self._measurement = spec, assignments, measurement
        # from which the other replicas can be reached
        self._graph = tf.compat.v1.get_default_graph()
        self.results: list[Summand] = []
        """All sums so far, which are equal on all replicas."""
        self.means: list[tf.Tensor] = []
        """Losses so far: their mean over replicas, by samples, is what one device has."""
        self._joins: dict[int, tuple[tf.Tensor, Join]] = {}

    def joined_by(self, join: Join, value: tf.Tensor) -> tf.Tensor:
        """Return a summand whose values of several micro-batches are not simply added up."""
        value = value if self._spec.parts is None else tf.identity(value)
        self._joins[id(value)] = value, join
        return value

    def refuse_parts(self, what: str, instead: str) -> None:
        """Refuse to sum over all samples before the last micro-batch is computed."""
        if self._spec.parts is not None:
            self._spec.parts.refuse(what, instead)

    def join_of(self, value: tf.Tensor) -> Join:
        return self._joins[id(value)][1] if id(value) in self._joins else tf.add

    def __call__(
        self, values: Nest, prepare: Callable[[tf.Tensor], tf.Tensor] | None = None
    ) -> Nest:
        """Sum a structure of tensors and `tf.IndexedSlices`; None stays."""
        # All but slices and large ones are packed in buffers, which `prepare` changes in order.
        flat = tf.nest.flatten(values)
        packed, alone = dict[tuple[tf.DType, int], list[int]](), list[int]()
        num_bytes = collections.Counter[tf.DType]()
        for place, item in enumerate(flat):
            if isinstance(item, tf.IndexedSlices):
                alone.append(place)
            elif item is not None:
                flat[place] = tf.convert_to_tensor(item)
                if travels_alone(flat[place]):
                    alone.append(place)
                else:
                    dtype = flat[place].dtype
                    buffer = dtype, num_bytes[dtype] // _BYTES_OF_A_BUFFER
                    packed.setdefault(buffer, []).append(place)
                    num_bytes[dtype] += (flat[place].shape.num_elements() or 0) * dtype.size
        buffers = [_packed([flat[place] for place in places]) for places in packed.values()]
        if prepare is not None:
            buffers = [prepare(buffer) for buffer in buffers]
        sums = self._all_reduced([*buffers, *(flat[place] for place in alone)])
        for total, places in zip(sums[: len(buffers)], packed.values(), strict=True):
            parts = _unpacked(total, [flat[place] for place in places])
            for place, part in zip(places, parts, strict=True):
                flat[place] = part
        for place, total in zip(alone, sums[len(buffers) :], strict=True):
            flat[place] = total
        return tf.nest.pack_sequence_as(values, flat)

    def sum_bucket(
        self,
        tensors: Sequence[tf.Tensor],
        prepare: Callable[[tf.Tensor], tf.Tensor],
        is_measured: bool = False,
    ) -> list[tf.Tensor]:
        """Sum gradients of one type, in the type in which they travel between workers."""
        # No time is taken where others are still computed.
        extended = tf.distribute.get_strategy().extended
        with extended.sending_as(extended.communication_dtype):
            (total,) = self._all_reduced([prepare(_packed(tensors))], is_measured)
        return _unpacked(total, tensors)

    def within_worker(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sum tensors over the replicas of this process only."""
        clock = self._measurement.clock if self._measurement else None
        if len(self._spec.local_replicas) == 1:
            return list(tensors)
        if clock is not None:
            started, tensors = clock.collective_starts(tensors)
        sums = tf.distribute.get_strategy().extended.sum_within_worker(tensors)
        if clock is not None:
            clock.collective_ends(started, sums)
        return list(sums)

    def _all_reduced(self, summands: list[Summand], is_measured: bool = True) -> list[Summand]:
        if not summands:
            return []
        clock = self._measurement.clock if self._measurement and is_measured else None
        if clock is not None:
            started, summands = clock.collective_starts(summands)
        extended = tf.distribute.get_strategy().extended
        with self._assignments.by_keras():  # a summation counts
            sums = extended.all_reduce_in_replica(tf.distribute.ReduceOp.SUM, summands)
        if clock is not None:
            clock.collective_ends(started, sums)
        self.results += sums
        return list(sums)

    def refuse_condition(self) -> None:
        """Refuse to sum in a branch, from which replicas of one process cannot be reached."""
        num_local = len(self._spec.local_replicas)
        is_alone = num_local == 1 and self._spec.parts is None
        if self._graph is tf.compat.v1.get_default_graph() or is_alone:
            return
        raise ValueError(
            "An update within tf.cond, tf.while_loop or a custom tf.function cannot add up "
            f"the gradients of the {num_local} replicas of a process. Received: optimizer.apply, "
            "apply_gradients or reduce_over_replicas there, in a train_step. Take it out of the "
            "condition, let the optimizer accumulate (keras.optimizers.Adam("
            "gradient_accumulation_steps=2)), or start one process for each device."
        )


def _packed(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """One buffer moves faster than many tensors, and is one collective."""
    if len(tensors) == 1:
        return tensors[0]
    return tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], axis=0)


def _unpacked(buffer: tf.Tensor, like: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    if len(like) == 1:
        return [buffer]
    sizes = [tf.size(t) if t.shape.num_elements() is None else t.shape.num_elements() for t in like]
    shapes = [t.shape if t.shape.is_fully_defined() else tf.shape(t) for t in like]
    parts = zip(tf.split(buffer, sizes), shapes, strict=True)
    return [tf.reshape(part, shape) for part, shape in parts]
