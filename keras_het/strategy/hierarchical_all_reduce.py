"""All-reduce in two levels: local devices first, then one member per worker."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_het import private_api
from keras_het.packed_variables import pack, unpack
from keras_het.strategy.cluster import nccl
from keras_het.strategy.exact.step import travels_alone
from keras_het.strategy.sums_by_host import SumsByHost, use_shared_instances
from keras_het.value_types import Nest, Summand

if TYPE_CHECKING:
    from keras_het.summation.group import SummationGroup

# The collective gathers float16, float32, float64, int32 and int64. Other types travel as one that
# holds every value (uint64 wraps around, and back again).
_TYPES_TO_GATHER_AS = {
    tf.bfloat16: tf.float32,
    tf.bool: tf.int32,
    tf.int8: tf.int32,
    tf.int16: tf.int32,
    tf.uint8: tf.int32,
    tf.uint16: tf.int32,
    tf.uint32: tf.int64,
    tf.uint64: tf.int64,
}
# NCCL sums other types too; the types of gradients are worth a collective of each device.
_TYPES_FOR_NCCL = (tf.float16, tf.float32, tf.float64)
_TYPES_TO_ROUND = {tf.float32, tf.float64}
_MOST_WORKERS_TO_GATHER = 3


def is_joined_by_nccl(devices: Sequence[str], options: private_api.CommunicationOptions) -> bool:
    """Whether TensorFlow's NCCL can sum between a process's devices, as `MirroredStrategy` does."""
    # Unlike GPUs are tried first, since NCCL may wait for ever between them. RING declines.
    names = [device.rpartition("device:")[2] for device in devices]
    if len(names) < 2 or any(name.split(":")[0] != "GPU" for name in names):
        return False
    if options.implementation == nccl.Implementation.RING:
        return False
    physical = tf.config.get_visible_devices("GPU")
    if len(physical) != len(tf.config.list_logical_devices("GPU")):
        return False  # parts of a GPU
    if not tf.sysconfig.get_build_info().get("is_cuda_build"):
        return False
    used = [physical[int(name.split(":")[1])] for name in names]
    products = {
        tf.config.experimental.get_device_details(device).get("device_name") for device in used
    }
    is_alike = len(products) == 1 and None not in products
    is_asked_for = options.implementation == nccl.Implementation.NCCL
    return is_alike or is_asked_for or nccl.joins(names)


# TensorFlow's requires the same number of devices in every process (tensorflow#47203). Here a
# worker is one member, and moves its tensors over the network once. Dense tensors of one type
# travel in one packed collective, large ones in one each; workers of a host are summed there
# (`SumsByHost`).
class HierarchicalAllReduce(private_api.CollectiveAllReduce):
    """Sum over the local devices, all-reduce with one member per worker, copy back."""

    def __init__(
        self,
        devices: Sequence[str],
        num_workers: int,
        num_replicas: int,
        options: private_api.CommunicationOptions,
        collective_keys: private_api.CollectiveKeys,
        first_local_key: int,
    ) -> None:
        super().__init__(
            devices=(devices[0],),
            group_size=num_workers,
            options=options,
            collective_keys=collective_keys,
        )
        use_shared_instances(self)
        self._local_devices = tuple(devices)
        self._num_replicas = num_replicas
        self._nccl: private_api.CollectiveAllReduce | None = None
        if is_joined_by_nccl(devices, options):
            self._nccl = private_api.local_nccl(self, devices, first_local_key)
        # Whether machines sum float32 values in place of the collective, and how they are reached
        # from here; None where another worker of the host does that.
        self.uses_summation = False
        self.summation: SummationGroup | None = None
        # What is traced meanwhile travels between workers as this type, of 16 bits.
        self.sends_as: tf.DType | None = None
        # Graphs traced meanwhile reduce among this worker's devices only.
        self.stays_within_worker = False

    def sum_by_host(self, hosts: Sequence[int], worker: int, first_key: int) -> None:
        """Let dense tensors be summed by host, in graphs traced from now on; see `SumsByHost`."""
        device = self._local_devices[0]
        sums = SumsByHost(device, hosts, worker, self._options, first_key)
        self._launchers[0].by_host = sums

    def _all_reduce_per_replica_values(
        self,
        reduce_op: tf.distribute.ReduceOp,
        per_replica_values: Sequence[tf.distribute.DistributedValues],
        options: private_api.CommunicationOptions,
    ) -> list[tf.distribute.DistributedValues | Summand]:
        by_nccl = self._sum_by_nccl(per_replica_values)
        with tf.device(self._local_devices[0]):
            local_sums = [
                by_nccl[place].values[0] if place in by_nccl else _sum(value.values)
                for place, value in enumerate(per_replica_values)
            ]
        reduced = self._all_reduce(reduce_op, local_sums, 0, options)
        if self._is_among_workers or reduce_op != tf.distribute.ReduceOp.SUM:
            by_nccl = {}  # the final value is on the first device
        return [
            by_nccl[place] if place in by_nccl else self._mirror(value)
            for place, value in enumerate(reduced)
        ]

    @property
    def _is_among_workers(self) -> bool:
        return self._group_size > 1 and not self.stays_within_worker

    def _sum_by_nccl(
        self, per_replica_values: Sequence[tf.distribute.DistributedValues]
    ) -> dict[int, tf.distribute.DistributedValues]:
        """Sum over the local devices, to all of them; return the sums by their places."""
        if self._nccl is None or tf.executing_eagerly():
            return {}
        by_type: dict[tuple[tf.DType, int | None], list[int]] = {}
        for place, value in enumerate(per_replica_values):
            first = value.values[0]
            if not isinstance(first, tf.IndexedSlices) and first.dtype in _TYPES_FOR_NCCL:
                kind = first.dtype, place if travels_alone(first) else None
                by_type.setdefault(kind, []).append(place)
        found: dict[int, tf.distribute.DistributedValues] = {}
        for places in by_type.values():
            values = [per_replica_values[place] for place in places]
            found |= zip(places, private_api.sums_of_replicas(self._nccl, values), strict=True)
        return found

    def _all_reduce(
        self,
        reduce_op: tf.distribute.ReduceOp,
        value: Nest,
        replica_id: int,
        options: private_api.CommunicationOptions,
    ) -> Nest:
        flat = list(tf.nest.flatten(value))
        if self._is_among_workers:
            flat = self._all_reduce_by_type(flat, replica_id, options)
        if reduce_op == tf.distribute.ReduceOp.MEAN:
            local = len(self._local_devices)
            number = local if self.stays_within_worker else self._num_replicas
            with tf.device(self._local_devices[0]):
                flat = [_divide(item, number) for item in flat]
        return tf.nest.pack_sequence_as(value, flat)

    def _all_reduce_by_type(
        self, flat: list[Summand], replica_id: int, options: private_api.CommunicationOptions
    ) -> list[Summand]:
        """Sum over the workers; one packed collective per element type, large ones alone."""
        if self.sends_as is not None and {item.dtype for item in flat} <= _TYPES_TO_ROUND:
            return [self._sum_of_rounded(item, self.sends_as) for item in flat]
        by_type: dict[tuple[tf.DType, bool, int | None], list[int]] = {}
        for position, item in enumerate(flat):
            by_service = self.uses_summation and suits_summation(item)
            alone = position if travels_alone(item) and not by_service else None
            by_type.setdefault((item.dtype, by_service, alone), []).append(position)
        result = list(flat)
        for (_, by_service, _), positions in by_type.items():
            values = [flat[p] for p in positions]
            if by_service:
                with tf.device(self._local_devices[0]):
                    summed = self._sum_by_machines(values)
            else:
                summed = super()._all_reduce(
                    tf.distribute.ReduceOp.SUM, values, replica_id, options
                )
            for position, item in zip(positions, summed, strict=True):
                result[position] = item
        return result

    def _sum_by_machines(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        group, by_host = self.summation, self._launchers[0].by_host
        if group is not None and by_host is None:
            return [tf.identity(value) for value in group.sum(values)]
        between = None if group is None else lambda vector: group.sum([vector])[0]
        total = by_host.sum_through(pack(values), between)
        return unpack(total, [value.shape for value in values])

    def _sum_of_rounded(self, value: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        r"""Sum what each worker has rounded, in the value's own type and the order of workers."""
        # TensorFlow's ring would round each partial sum. Two or three workers send all to all
        # others. Where more would move as much as a ring of float32, each adds up one part, whose
        # sum is rounded.
        launcher, number = self._launchers[0], self._group_size
        is_in_parts = number > _MOST_WORKERS_TO_GATHER
        size = value.shape.num_elements()
        size = tf.size(value) if size is None else size
        padding = -size % (2 * number if is_in_parts else 2)
        sent = _as_pairs(tf.pad(tf.reshape(value, [-1]), [[0, padding]]), dtype)
        if is_in_parts:
            received = launcher.all_to_all(tf.reshape(sent, [number, -1]))
        else:
            received = tf.reshape(launcher.all_gather_equal(sent), [number, -1])
        of_workers = tf.reshape(tf.bitcast(received, dtype), [number, -1])
        total = functools.reduce(tf.add, tf.unstack(tf.cast(of_workers, value.dtype)))
        if is_in_parts:
            sums = launcher.all_gather_equal(_as_pairs(total, dtype))
            total = tf.cast(tf.reshape(tf.bitcast(sums, dtype), [-1]), value.dtype)
        return tf.reshape(total[:size], tf.shape(value))

    def _batch_all_gather(
        self,
        per_replica_values: Sequence[tf.distribute.DistributedValues],
        axis: int,
        options: private_api.CommunicationOptions,
    ) -> list[tf.distribute.DistributedValues | Summand]:
        with tf.device(self._local_devices[0]):
            local = [tf.concat(value.values, axis=axis) for value in per_replica_values]
        return [self._mirror(self.gather_between_workers(value, axis, options)) for value in local]

    def gather_between_workers(
        self,
        value: tf.Tensor,
        axis: int = 0,
        options: private_api.CommunicationOptions | None = None,
    ) -> tf.Tensor:
        """Concatenate one tensor of every worker along `axis`, in worker order."""
        if not self._is_among_workers:
            return value
        options = self._options if options is None else self._options.merge(options)
        carried = tf.cast(value, _TYPES_TO_GATHER_AS.get(value.dtype, value.dtype))
        if tf.executing_eagerly():  # TensorFlow gathers in graphs only.
            spec = tf.TensorSpec([None] * carried.shape.rank, carried.dtype)
            gathered = self._gather_function(axis, options, spec)(carried)
        else:
            gathered = self._launchers[0].all_gather(carried, axis, options)
        return tf.cast(gathered, value.dtype)

    def new_barrier(self) -> Callable[[], tf.Tensor]:
        """Make a function that returns when all workers have called it; it is traced already."""
        # With separate keys, nothing else would match it.
        gather = tf.function(lambda value: self._launchers[0].all_gather(value, 0, self._options))
        with tf.device(self._local_devices[0]):
            own = tf.zeros([1], tf.int64)
            return functools.partial(gather.get_concrete_function(own), own)

    def sum_between_workers(self, value: tf.Tensor) -> tf.Tensor:
        """Sum one tensor of every worker; in the graph."""
        if self._group_size == 1:
            return value
        return self._all_reduce_by_type([value], 0, self._options)[0]

    @functools.lru_cache(maxsize=32)  # noqa: B019 - the strategy lives as long as its process.
    def _gather_function(
        self, axis: int, options: private_api.CommunicationOptions, spec: tf.TensorSpec
    ) -> tf.types.experimental.PolymorphicFunction:
        # one trace each: TensorFlow warns of a function that is retraced again and again
        return tf.function(
            lambda value: self._launchers[0].all_gather(value, axis, options),
            input_signature=[spec],
        )

    def _mirror(self, value: Summand) -> tf.distribute.DistributedValues | Summand:
        copies = []
        for device in self._local_devices:
            with tf.device(device):
                copies.append(tf.nest.map_structure(tf.identity, value, expand_composites=True))
        return private_api.regroup(tuple(copies), wrap_class=private_api.Mirrored)

    def __deepcopy__(self, memo: dict[int, Any]) -> HierarchicalAllReduce:
        # Collective keys must stay shared: a copy with its own keys would hang the group.
        return self


def _sum(values: Sequence[Summand]) -> Summand:
    if len(values) == 1:
        return values[0]
    if any(isinstance(value, tf.IndexedSlices) for value in values):
        return tf.IndexedSlices(
            values=tf.concat([value.values for value in values], axis=0),
            indices=tf.concat([value.indices for value in values], axis=0),
            dense_shape=values[0].dense_shape,
        )
    return tf.add_n(values)


def _as_pairs(value: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Round to 16 bits; two values have the bits of one float32, which every transport carries."""
    return tf.bitcast(tf.reshape(tf.cast(value, dtype), [-1, 2]), tf.float32)


def _divide(value: Summand, divisor: int) -> Summand:
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(value.values / divisor, value.indices, value.dense_shape)
    return value / tf.cast(divisor, value.dtype)


def suits_summation(value: Summand) -> bool:
    """Whether a value can be summed by machines: dense float32 of known shape, in a function."""
    # Keras infers shapes in a graph that never runs, differently on each worker.
    return (
        isinstance(value, tf.Tensor)
        and not tf.executing_eagerly()
        and private_api.function_being_traced(value.graph) is not None
        and value.dtype == tf.float32
        and bool(value.shape.num_elements())
    )
