"""Rate and latency of the links between the processes of a pipeline, measured."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from keras_het.planning.bounded_shares import FloatArray
from keras_het.strategy.pipeline.step.transport import CollectiveTransport

_SMALL, _LARGE = 256, 1 << 18
_RUNS = 5


def measure_links(
    transport: CollectiveTransport, gather: Callable[[np.ndarray], np.ndarray]
) -> tuple[FloatArray, FloatArray]:
    """Measure every pair of processes, one after the other; all of them must call it.

    A message goes there and comes back. Of the times, the least count: other traffic can only add.
    """
    own, number = transport.process, transport.processes
    mine = np.zeros([1, number, 2])
    messages = itertools.count()
    for first, second in itertools.combinations(range(number), 2):
        numbers = [(next(messages), next(messages)) for _ in range(2)]
        if own in (first, second):
            there = second if own == first else first
            small, large = (
                _round_trip_seconds(transport, there, own == first, size, pair)
                for size, pair in zip((_SMALL, _LARGE), numbers, strict=True)
            )
            rate = 4 * (_LARGE - _SMALL) / max((large - small) / 2, 1e-9)
            mine[0, there] = rate, small / 2
    everyone = gather(mine)
    # both ends have measured a link
    rate = np.maximum(everyone[..., 0], everyone[..., 0].T)
    latency = np.minimum(everyone[..., 1], everyone[..., 1].T)
    rate[np.arange(number), np.arange(number)] = np.inf
    return rate, latency


def _round_trip_seconds(
    transport: CollectiveTransport, other: int, begins: bool, size: int, numbers: tuple[int, int]
) -> float:
    there, back = numbers

    @tf.function(autograph=False)
    def exchange(value: tf.Tensor) -> tf.Tensor:
        if begins:
            sent = transport.send(value, other, there)
            with tf.control_dependencies([sent]):
                return transport.receive(1, tf.float32, other, back)
        received = transport.receive(1, tf.float32, other, there)
        with tf.control_dependencies([transport.send(received, other, back)]):
            return tf.identity(received)

    value = tf.zeros([size])
    exchange(value).numpy()
    times = []
    for _ in range(_RUNS):
        begin = time.perf_counter()
        exchange(value).numpy()
        times.append(time.perf_counter() - begin)
    return min(statistics.median(times), min(times) * 1.5)
