"""All-reduce in two levels between workers: the processes of each host first, then the hosts."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

import tensorflow as tf

from keras_het import private_api
from keras_het.strategy.shared_instances import SharedInstances, use_shared_instances

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
