"""Measures what an exchange with a center would cost this cluster, before there is a center."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from keras_het.asynchronous.exchange.model_vectors import ModelVectors
from keras_het.strategy.measure.compute_times import StepTimes
from keras_het.training_strategy import TrainingStrategy

_TIMES = 15
_PARTS = 4
"""Reading, updating or reporting, claiming batches and writing: each takes about as long."""


class ExchangeTimes(NamedTuple):
    """What an exchange costs beside the travel of its bytes.

    Attributes:
        all_reduce_seconds: time of a step's collective, once the last worker has its gradients.
        busy_seconds: what a task does itself, estimated from the time to read its weights.
    """

    all_reduce_seconds: float
    busy_seconds: float


def measure_exchange(
    model: Any, strategy: TrainingStrategy, partition_size: int, steps: Sequence[StepTimes]
) -> ExchangeTimes:
    """Measures reading the weights, and what collectives took; all workers must call it.

    An all-reduce beside nothing else would say too little: tasks that train have other things to do
    than to pass its messages on.

    Nothing is written: weights of 64 bits would lose some of them.

    Args:
        model: the model that is trained.
        strategy: the `HeterogeneousStrategy`, of several workers.
        partition_size: elements of a part of the weights.
        steps: that were measured.

    Returns:
        The same on all workers: machines could measure differently. Of the collectives the least of
        all workers in each step, median over steps; of reading the leader's.
    """
    weights = ModelVectors(model, strategy, partition_size).weights
    readings = _seconds_of(lambda: [part.numpy() for part in weights.read()])
    busy = _PARTS * statistics.median(readings)
    own = np.array([[*(_waited(step, strategy.layout.local_replicas) for step in steps), busy]])
    found = strategy.extended.gather_over_workers(own)
    # who computes longest waits for nobody
    return ExchangeTimes(float(np.median(found[:, :-1].min(axis=0))), float(found[0, -1]))


def _waited(step: StepTimes, local: range) -> float:
    """Seconds from the gradients of this worker's last replica to the end of the collective."""
    seconds = step.seconds[local.start : local.stop]
    return float(step.collective_seconds - (seconds.max() - seconds[0]))


def _seconds_of(run: Callable[[], Any]) -> list[float]:
    """Times of several runs; the first one, which is traced, does not count."""
    times = []
    for _ in range(1 + _TIMES):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return times[1:]
