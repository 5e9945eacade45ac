"""Per-replica batches that carry every replica's share with them."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import tensorflow as tf

from keras_het import private_api
from keras_het.loader import tf_data_adapter as adapter
from keras_het.loader.order import rows
from keras_het.loader.order.rows import count_bytes
from keras_het.planning import apportion
from keras_het.strategy.measure.memory_use import USABLE, memory_of
from keras_het.value_types import Leaf, Nest, Rows

if TYPE_CHECKING:
    from keras_het.strategy.heterogeneous_strategy import HeterogeneousStrategy


# The step thus knows the size of the global batch without asking other workers. The type has an
# unknown number of rows: a function is not traced again when shares change.
class UnevenPerReplica(private_api.PerReplica):
    """One component of a global batch, cut into the local replicas' shares."""

    def __init__(
        self, values: Sequence[Rows], sizes: tf.Tensor, devices: Sequence[str] = ()
    ) -> None:
        super().__init__(values)
        self._values: tuple[Rows, ...]
        self.sizes = sizes
        """The shares of all replicas, int64 of shape [num_replicas]."""
        self._targets = devices
        self._spec: UnevenPerReplicaSpec | None = None

    @property
    def values(self) -> tuple[Rows, ...]:
        """The replicas' parts, each on its replica's device."""
        # A function that receives the whole batch moves what its replicas read.
        if self._targets and tf.executing_eagerly():
            placed = zip(self._values, self._targets, strict=True)
            self._values, self._targets = tuple(on_device(*part) for part in placed), ()
        return self._values

    @property
    def host_values(self) -> tuple[Rows, ...]:
        """The replicas' parts, wherever they are now."""
        return self._values

    @property
    def shape(self) -> tf.TensorShape:
        """The shape of any replica's part: its number of rows is None."""
        return self._type_spec.value_specs[0].shape

    @property
    def dtype(self) -> tf.DType:
        return self._type_spec.value_specs[0].dtype

    @property
    def global_spec(self) -> tf.TypeSpec:
        """The type of the whole global batch, rows counted; the same on every worker."""
        return with_rows(self._type_spec.value_specs[0], int(tf.reduce_sum(self.sizes)))

    @property
    def _type_spec(self) -> UnevenPerReplicaSpec:
        # TensorFlow asks several times for each call of a function.
        if self._spec is None:
            specs = tuple([_any_number_of_rows(value) for value in self._values])
            self._spec = _only_spec(specs, int(self.sizes.shape[0]))
        return self._spec


class UnevenPerReplicaSpec(tf.TypeSpec):
    """The type of an `UnevenPerReplica`."""

    __slots__ = ["_hash", "_num_replicas", "value_specs"]

    value_type = property(lambda self: UnevenPerReplica)

    def __init__(self, value_specs: Sequence[tf.TypeSpec], num_replicas: int) -> None:
        self.value_specs = tuple(value_specs)
        """One type per local replica."""
        self._num_replicas = num_replicas
        self._hash = hash((UnevenPerReplicaSpec, self.value_specs, num_replicas))

    # The inherited methods walk the whole type each time, in every step.
    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, UnevenPerReplicaSpec)
            and self._hash == other._hash
            and self._serialize() == other._serialize()
        )

    def _serialize(self) -> tuple[tuple[tf.TypeSpec, ...], int]:
        return (self.value_specs, self._num_replicas)

    @property
    def _component_specs(self) -> tuple[tuple[tf.TypeSpec, ...], tf.TensorSpec]:
        return (self.value_specs, tf.TensorSpec([self._num_replicas], tf.int64))

    def _to_components(self, value: UnevenPerReplica) -> tuple[tuple[Rows, ...], tf.Tensor]:
        return (value.host_values, value.sizes)

    def _from_components(self, components: tuple[Sequence[Rows], tf.Tensor]) -> UnevenPerReplica:
        values, sizes = components
        return UnevenPerReplica(values, sizes)


def wrap_shares(
    local_batches: Sequence[Nest], sizes: tf.Tensor | np.ndarray, devices: Sequence[str] = ()
) -> Nest:
    """Build the structure of `UnevenPerReplica` that a train step receives."""
    return _wrap(local_batches, tf.convert_to_tensor(sizes, tf.int64), devices)


def _wrap(values: Sequence[Nest], sizes: tf.Tensor, devices: Sequence[str]) -> Nest:
    # Most batches are tuples; tf.nest takes longer for one than a small step does.
    if type(values[0]) is tuple:
        return tuple([_wrap(part, sizes, devices) for part in zip(*values, strict=True)])
    if tf.is_tensor(values[0]):
        return _wrap_leaf(values, sizes, devices)
    return tf.nest.map_structure(
        lambda *leaves: _wrap_leaf(leaves, sizes, devices), *values, expand_composites=False
    )


def _wrap_leaf(
    values: Sequence[Leaf], sizes: tf.Tensor, devices: Sequence[str]
) -> UnevenPerReplica | None:
    # None stands for an absent target or sample weight in Keras's data structures, and so does
    # an Optional, which Keras makes from a generator's None.
    is_absent = values[0] is None or isinstance(values[0], tf.experimental.Optional)
    return None if is_absent else UnevenPerReplica(values, sizes, devices)


def wrapped_spec(spec: Nest, num_local: int, num_replicas: int) -> Nest:
    def leaf_spec(leaf: tf.TypeSpec | None) -> UnevenPerReplicaSpec | None:
        is_absent = leaf is None or isinstance(leaf, tf.OptionalSpec) or adapter.is_none(leaf)
        return None if is_absent else UnevenPerReplicaSpec((leaf,) * num_local, num_replicas)

    return tf.nest.map_structure(leaf_spec, spec)


def find_sizes(structure: Nest) -> tf.Tensor | None:
    for leaf in tf.nest.flatten(structure):
        if isinstance(leaf, UnevenPerReplica):
            return leaf.sizes
    return None


def _any_number_of_rows(value: Rows) -> tf.TypeSpec:
    if isinstance(value, tf.Tensor) and value.shape.rank:
        return _dense_spec(value.dtype, tuple(value.shape[1:]))
    return with_rows(private_api.type_spec_from_value(value), None)


def with_rows(spec: tf.TypeSpec, number: int | None) -> tf.TypeSpec:
    """Return the type of a tensor with so many rows, None for any number."""
    if not spec.shape.rank:
        return spec
    shape = [number, *spec.shape.as_list()[1:]]
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(
            shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype, spec.flat_values_spec
        )
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.SparseTensorSpec(shape, spec.dtype)
    return tf.TensorSpec(shape, spec.dtype)


@functools.lru_cache(maxsize=256)
def _dense_spec(dtype: tf.DType, inner_shape: tuple[int | None, ...]) -> tf.TensorSpec:
    return tf.TensorSpec([None, *inner_shape], dtype)


@functools.lru_cache(maxsize=256)
def _only_spec(specs: tuple[tf.TypeSpec, ...], num_replicas: int) -> UnevenPerReplicaSpec:
    # the same object for each batch of a type, so that TensorFlow need not compare its parts
    return UnevenPerReplicaSpec(specs, num_replicas)


def share_out(strategy: HeterogeneousStrategy, data: Nest) -> Nest:
    """Cut a plain batch, as of `train_on_batch`, by the share weights in effect when it runs."""
    leaves = tf.nest.flatten(data)
    if any(isinstance(leaf, tf.distribute.DistributedValues) for leaf in leaves):
        return data
    leaves = [_as_tensor(leaf) for leaf in leaves]
    to_cut = [leaf for leaf in leaves if rows.has_rows(leaf)]
    if not to_cut:
        return data
    with tf.device("CPU:0"):  # what is computed of sizes waits for no device
        sizes = _sizes(strategy, rows.count_rows(to_cut))
        starts = tf.unstack(tf.cumsum(sizes, exclusive=True))
        counts = tf.unstack(sizes)

    def part(replica: int) -> Nest:
        cut = iter(rows.slice_rows(to_cut, starts[replica], counts[replica]))
        own = [next(cut) if rows.has_rows(leaf) else leaf for leaf in leaves]
        return tf.nest.pack_sequence_as(data, own)

    return wrap_shares([part(replica) for replica in strategy.layout.local_replicas], sizes)


def _as_tensor(leaf: Leaf) -> Leaf:
    is_array = hasattr(leaf, "__array__") and not rows.is_sliceable(leaf)
    return tf.convert_to_tensor(leaf) if is_array else leaf


def _sizes(strategy: HeterogeneousStrategy, total: tf.Tensor) -> tf.Tensor:
    num_replicas = strategy.layout.num_replicas
    if num_replicas == 1:
        return tf.reshape(total, [1])

    # Called in every step: one trace serves all shares.
    def apportioned(total: np.int64 | np.ndarray) -> np.ndarray:
        return np.asarray(apportion(int(total), strategy.share_weights), np.int64)

    return tf.ensure_shape(tf.numpy_function(apportioned, [total], tf.int64), [num_replicas])


SWITCH = "KERAS_HET_PREFETCH"


def is_worthwhile(devices: Sequence[str]) -> bool:
    """Whether batches have to be copied to these devices, and are to be copied ahead."""
    setting = os.environ.get(SWITCH)
    return setting == "1" or (setting != "0" and any("CPU" not in device for device in devices))


class Placement:
    """Copies each local replica's part of a batch to its device."""

    def __init__(self, devices: Sequence[str]) -> None:
        self._devices = devices

    def __call__(self, parts: list[Nest]) -> list[Nest]:
        """Return the parts, dense tensors of which lie on the devices."""
        return [
            tf.nest.map_structure(lambda leaf, device=device: _dense_on(leaf, device), part)
            for part, device in zip(parts, self._devices, strict=True)
        ]

    def ahead(self, parts: list[Nest]) -> list[Nest]:
        """Return the same while a step computes; parts stay on the host where memory is short."""
        for part, device in zip(parts, self._devices, strict=True):
            memory = memory_of(device)
            room = None if memory is None else USABLE * memory.limit - memory.peak
            if room is not None and count_bytes(part) > room:
                return parts
        try:
            return self(parts)
        except tf.errors.ResourceExhaustedError:
            return parts


def on_device(value: Rows, device: str) -> Rows:
    """Return a tensor, ragged or sparse ones included, on a device."""
    if getattr(value, "backing_device", "").endswith(device):  # which may name no job and task
        return value
    with tf.device(device):
        return tf.nest.map_structure(tf.identity, value, expand_composites=True)


def _dense_on(leaf: Nest, device: str) -> Nest:
    is_numbers = tf.is_tensor(leaf) and not isinstance(leaf, tf.__internal__.CompositeTensor)
    # strings lie on the host, and so do integers of 32 bits of a GPU
    if not is_numbers or leaf.dtype in (tf.string, tf.int32, tf.variant):
        return leaf
    return on_device(leaf, device)
