"""A replica's compute time: from its batch to its gradients, without any wait for other replicas.

An all-reduce is a barrier: it makes the steps of all replicas equally long, so that step times say
nothing about a device. The clock therefore stops before the collective. Collectives inside the
forward or backward pass (SyncBatchNormalization) are taken out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_het import private_api


class StepClock:
    """Times one replica's part of one step, in the graph.

    Args:
        inputs: the replica's batch; time runs from when it is there. The step must compute on
            `self.inputs` in its place: nothing else keeps it from starting before the clock.
        on_accelerator: whether the replica computes on a device that works behind the host's back.
            There, a tensor is "ready" for the host when its computation is queued; only a value
            that was copied back tells when it was done.
    """

    def __init__(self, inputs: Any, on_accelerator: bool) -> None:
        self._on_accelerator = on_accelerator
        self.start_time = self._time_when_ready(_tensors(inputs))
        self.inputs = _after(self.start_time, inputs)
        self._graph = getattr(self.start_time, "graph", None)
        self._waits: list[Any] = []
        self.seconds: Any = None
        """Compute time in seconds, float64 scalar; None before `stop`."""
        self._end_time: Any = None

    def stop(self, values: Sequence[Any]) -> None:
        """Notes the time at which values are computed; called again, the later time counts.

        Args:
            values: what the replica is about to hand to a collective.
        """
        end = self._end_time = self._time_when_ready(_tensors(values))
        waits = tf.add_n(self._waits) if self._waits else tf.constant(0, tf.float64)
        self.seconds = tf.maximum(end - self.start_time - waits, 0)

    def seconds_since_stop(self, results: Sequence[Any]) -> Any:
        """Time from `stop` until something else is there, float64 scalar.

        Args:
            results: of the collective that the values went into.
        """
        return self._time_when_ready(_tensors(results)) - self._end_time

    def collective_starts(self, values: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Notes when a collective inside the step has what it sums.

        Returns:
            The time, and the values to give to the collective.
        """
        started = self._time_when_ready(_tensors(values))
        return started, _after(started, list(values))

    def collective_ends(self, started: Any, results: Sequence[Any]) -> None:
        """Takes the time of a collective inside the step out of the compute time."""
        waited = self._time_when_ready(_tensors(results)) - started
        # One in a branch or a loop belongs to another graph and cannot be read from here.
        if getattr(waited, "graph", None) is self._graph:
            self._waits.append(waited)

    def _time_when_ready(self, values: Sequence[Any]) -> Any:
        """Reads the clock once all values are there.

        Independently of other stateful operations: a replica would have to wait with its start for
        the end of the one before it.
        """
        if self._on_accelerator:
            values = _on_host(values)
        with tf.control_dependencies(list(values)), tf.device("CPU:0"):
            return private_api.run_independently(tf.timestamp())


def _after(time: Any, structure: Any) -> Any:
    """The same values, not before `time` was read."""
    leaves = tf.nest.flatten(structure, expand_composites=True)
    with tf.control_dependencies([time]):
        gated = [tf.identity(leaf) if tf.is_tensor(leaf) else leaf for leaf in leaves]
    return tf.nest.pack_sequence_as(structure, gated, expand_composites=True)


def _tensors(structure: Any) -> list[Any]:
    leaves = tf.nest.flatten(structure, expand_composites=True)
    return [leaf for leaf in leaves if tf.is_tensor(leaf)]


def _on_host(values: Sequence[Any]) -> list[Any]:
    """One element of each value, copied to the host once the device has computed it."""
    firsts = [_first_element(value) for value in values if value.dtype != tf.string]
    with tf.device("CPU:0"):
        return [tf.identity(first) for first in firsts]


def _first_element(value: Any) -> Any:
    return tf.reshape(value, [-1])[:1]
