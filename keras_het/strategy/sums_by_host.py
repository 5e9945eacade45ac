"""All-reduce in two levels between workers: the processes of each host first, then the hosts."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import tensorflow as tf

from keras_het import private_api

_Kind: TypeAlias = tuple[str, tf.DType, tuple[int, ...]]


def use_shared_instances(collectives: private_api.CollectiveAllReduce) -> None:
    """Bound TensorFlow's bookkeeping for the collectives launched from now on."""
    for launcher in collectives._launchers:
        launcher.__class__ = SharedInstances
        launcher._instances = {}


# TensorFlow gives every call an instance and frees none: 1.5 KB a collective of each step. The
# calls of a group come in the same order on all workers, so calls of a kind may share one; NCCL's
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


_PART_BYTES = 1_000_000
_MOST_PARTS = 8


def is_worth_it(hosts: Sequence[int]) -> bool:
    """Whether a sum by host puts fewer bytes on a link than one ring of all workers."""
    return 1 < len(set(hosts)) < len(hosts)


def num_keys(hosts: Sequence[int]) -> int:
    """Return how many group keys the sums of these workers need."""
    return 2 * len(set(hosts)) + 1


# With W workers on H hosts, a link carries 2 (H - 1) / H of a value in each direction; 2 (W - 1) /
# W in a ring of all. Every worker receives the same bits (Jiang et al., BytePS, OSDI 2020).
class SumsByHost:
    r"""Sums over the processes of each host, then over the hosts, and back."""

    def __init__(
        self,
        device: str,
        hosts: Sequence[int],
        worker: int,
        options: private_api.CommunicationOptions,
        first_key: int,
    ) -> None:
        def launcher(size: int, key: int) -> SharedInstances:
            group = private_api.CollectiveAllReduce(
                devices=(device,),
                group_size=size,
                options=options,
                collective_keys=private_api.CollectiveKeys(group_key_start=key),
            )
            use_shared_instances(group)
            return group._launchers[0]

        host, num_hosts = hosts[worker], len(set(hosts))
        self._num_here = hosts.count(host)
        self._leads = hosts.index(host) == worker
        self._here, self._back = (
            launcher(self._num_here, key)
            for key in (first_key + host, first_key + num_hosts + host)
        )
        self._between = launcher(num_hosts, first_key + 2 * num_hosts)

    def all_reduce(
        self, value: tf.Tensor, options: private_api.CommunicationOptions | None = None
    ) -> tf.Tensor:
        """Sum a dense tensor of every worker; all workers must call it with the same shape."""
        # A large one is cut, so that a part can travel while hosts sum the next one.
        between = functools.partial(self._between.all_reduce, control_input=None, options=options)
        size = (value.shape.num_elements() or 0) * value.dtype.size
        if size < 2 * _PART_BYTES or tf.executing_eagerly():
            return self.sum_through(value, between)
        parts = _cut(tf.reshape(value, [-1]), min(size // _PART_BYTES, _MOST_PARTS))
        sums = [self.sum_through(part, between) for part in parts]
        return tf.reshape(tf.concat(sums, 0), value.shape)

    def sum_through(
        self, value: tf.Tensor, between: Callable[[tf.Tensor], tf.Tensor] | None
    ) -> tf.Tensor:
        """Sum a tensor of every worker."""
        if self._num_here > 1:
            value = self._here.all_reduce(value)
        if self._leads and between is not None:
            value = between(value)
        if self._num_here > 1:
            # A sum with zeros: unlike TensorFlow's broadcast it has a place in the order.
            value = self._back.all_reduce(value if self._leads else tf.zeros_like(value))
        return value


def _cut(flat: tf.Tensor, number: int) -> list[tf.Tensor]:
    size = int(flat.shape[0])
    ends = [size * index // number for index in range(number + 1)]
    return [flat[start:end] for start, end in itertools.pairwise(ends)]
