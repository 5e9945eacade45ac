"""Collectives that leave nothing behind in TensorFlow's bookkeeping."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeAlias

import tensorflow as tf

from keras_het import private_api

if TYPE_CHECKING:
    from keras_het.strategy.sums_by_host import SumsByHost

_Kind: TypeAlias = tuple[str, tf.DType, tuple[int, ...]]


def use_shared_instances(collectives: private_api.CollectiveAllReduce) -> None:
    """Bound TensorFlow's bookkeeping for the collectives launched from now on."""
    for launcher in collectives._launchers:
        launcher.__class__ = SharedInstances
        launcher._instances = {}


# TensorFlow gives every call an instance and frees none: 1.5 KB a collective of each step. The
# calls of a group come in the same order on all workers, so those of a kind may share one; NCCL's
# are left alone.
class SharedInstances(private_api.CollectiveReplicaLauncher):
    """A launcher of collectives that share an instance for each operation, type and shape."""

    _instances: dict[_Kind, tf.Tensor | int]
    # Sums dense tensors in place of one ring of all workers, where several share a host.
    by_host: SumsByHost | None = None
    _lock = threading.RLock()

    def all_reduce(
        self,
        input_tensor: tf.Tensor,
        control_input: tf.Tensor | tf.Operation | None = None,
        options: private_api.CommunicationOptions | None = None,
    ) -> tf.Tensor:
        if self.by_host is not None and control_input is None:
            return self.by_host.all_reduce(input_tensor, options)
        with self._sharing("all_reduce", input_tensor):
            return super().all_reduce(input_tensor, control_input, options)

    def all_gather_equal(self, value: tf.Tensor) -> tf.Tensor:
        """Concatenate a tensor of each worker, which has the same shape on all; in a graph."""
        with self._sharing("all_gather", value):
            gathered = self._all_gather(value, self._options)
        length = value.shape[0]
        rows = None if length is None else length * self._group_size
        gathered.set_shape([rows, *value.shape[1:]])
        return gathered

    def all_to_all(self, value: tf.Tensor) -> tf.Tensor:
        """Send row w to worker w; return the rows that all workers sent to this one; in a graph."""
        with self._sharing("all_to_all", value), tf.device(self._device):
            received = tf.raw_ops.CollectiveAllToAllV2(
                input=value,
                group_size=self._group_size,
                group_key=self._group_key,
                instance_key=self._next_instance_key(),
                ordering_token=[self._get_ordering_token()],
                communication_hint=self._options.implementation.value.lower(),
                timeout_seconds=self._options.timeout_seconds or 0,
            )
        received.set_shape(value.shape)
        return received

    def _sharing(self, operation: str, value: tf.Tensor) -> contextlib.AbstractContextManager[None]:
        if "GPU" in self._device.upper() or not value.shape.is_fully_defined():
            return contextlib.nullcontext()
        return self._launching((operation, value.dtype, tuple(value.shape)))

    @contextlib.contextmanager
    def _launching(self, kind: _Kind) -> Iterator[None]:
        """Make TensorFlow's launcher ask for the instance of this kind."""
        with self._lock:
            before = vars(self).get("_next_instance_key")
            self._next_instance_key = functools.partial(self._instance_of, kind)
            try:
                yield
            finally:
                del self._next_instance_key
                if before is not None:
                    self._next_instance_key = before

    def _instance_of(self, kind: _Kind) -> tf.Tensor | int:
        """Return the instance's number; in a graph, a placeholder filled by the function's call."""
        new_instance = private_api.CollectiveReplicaLauncher._next_instance_key
        if not tf.executing_eagerly():
            with self._launching(kind):
                return new_instance(self)
        if kind not in self._instances:
            self._instances[kind] = new_instance(self)
        return self._instances[kind]
