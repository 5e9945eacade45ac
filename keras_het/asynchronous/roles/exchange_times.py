"""Measure the cost of an exchange with a center on this cluster before a center exists."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_het.asynchronous.exchange.model_vectors import ModelVectors
from keras_het.strategy.measure.compute_times import StepTimes
from keras_het.training_strategy import TrainingStrategy

_TIMES = 15
_PARTS = 4
"""Reading, updating or reporting, claiming batches and writing: all take about equally long."""


class ExchangeTimes(NamedTuple):
    """The cost of an exchange besides the travel time of its bytes."""

    all_reduce_seconds: float
    busy_seconds: float


def measure_exchange(
    model: keras.Model, strategy: TrainingStrategy, partition_size: int, steps: Sequence[StepTimes]
) -> ExchangeTimes:
    """Measure weight reads and collectives; all workers must call it.

    An all-reduce on an otherwise idle cluster would say too little: training tasks do other work
    besides forwarding its messages.

    Nothing is written: weights of 64 bits would lose some of them.
    """
    weights = ModelVectors(model, strategy, partition_size).weights
    readings = _seconds_of(lambda: [part.numpy() for part in weights.read()])
    busy = _PARTS * statistics.median(readings)
    own = np.array([[*(_waited(step, strategy.layout.local_replicas) for step in steps), busy]])
    found = strategy.extended.gather_over_workers(own)
    # The worker that computes longest waits for no other.
    return ExchangeTimes(float(np.median(found[:, :-1].min(axis=0))), float(found[0, -1]))


def _waited(step: StepTimes, local: range) -> float:
    """Return the seconds from this worker's last gradients to the end of the collective."""
    seconds = step.seconds[local.start : local.stop]
    return float(step.collective_seconds - (seconds.max() - seconds[0]))


def _seconds_of(run: Callable[[], Any]) -> list[float]:
    """Return the times of several runs; the first one, which is traced, does not count."""
    times = []
    for _ in range(1 + _TIMES):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return times[1:]
