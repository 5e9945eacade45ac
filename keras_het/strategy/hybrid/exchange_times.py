"""Measures what an exchange with a center would cost this cluster, before there is a center."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_het.strategy.hybrid.model_vectors import ModelVectors

_TIMES = 15
_PARTS = 4
"""Reading, updating or reporting, claiming batches and writing: each takes about as long."""


class ExchangeTimes(NamedTuple):
    """What an exchange costs beside the travel of its bytes.

    Attributes:
        hop_seconds: time of a message between two workers, whatever its size.
        busy_seconds: what a task does itself, estimated from the time to read its weights.
    """

    hop_seconds: float
    busy_seconds: float


def measure_exchange(model: Any, strategy: Any, partition_size: int) -> ExchangeTimes:
    """Measures an all-reduce of one number, and reading the weights; all workers must call it.

    Nothing is written: weights of 64 bits would lose some of them.

    Args:
        model: the model that is trained.
        strategy: the `HeterogeneousStrategy`, of several workers.
        partition_size: elements of a part of the weights.

    Returns:
        The leader's times, on all workers: machines could measure differently.
    """
    weights = ModelVectors(model, strategy, partition_size).weights
    total = tf.function(strategy.extended.sum_over_workers, autograph=False)
    # whoever is late adds to an all-reduce: the least time is that of the links
    seconds = min(_seconds_of(lambda: total(tf.zeros([1])).numpy()))
    readings = _seconds_of(lambda: [part.numpy() for part in weights.read()])
    busy = _PARTS * statistics.median(readings)
    own = np.array([[seconds / (2 * (strategy.num_workers - 1)), busy]])
    hop, busy = strategy.extended.gather_over_workers(own)[0].tolist()
    return ExchangeTimes(hop, busy)


def _seconds_of(run: Callable[[], Any]) -> list[float]:
    """Times of several runs; the first one, which is traced, does not count."""
    times = []
    for _ in range(1 + _TIMES):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return times[1:]
