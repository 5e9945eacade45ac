"""The measured steps of a training, read seldom where they are short."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_het.planning.bounded_shares import FloatArray, IntArray
from keras_het.strategy.measure.compute_times import ComputeTimes, StepTimes
from keras_het.strategy.measure.sampled_steps import SampledSteps

# Reading and deciding takes about 0.3 ms of Python: 3 % of this.
LONG_STEP_SECONDS = 0.01
MOST_CALLS = 16
_MOST_STEPS = 64
_WARM_UP = 2.0


@dataclasses.dataclass(frozen=True)
class Reading:
    """Steps with the same shares that count as one: the last one, and their median times."""

    step: int
    shares: IntArray
    seconds: FloatArray
    wanted_shares: tuple[int, ...]


class MeasuredSteps:
    """Record of the steps that a training measures.

    Measured steps wait in a ring until they are read, so none is lost. The interval between two
    readings depends only on compute times, which are identical bit by bit on all workers, so all
    read, and change shares, after the same step.

    Attributes:
        rows: the latest steps, as users see them.
        count: number of steps so far.
        step_seconds: mean duration of the steps read last, all included; 0 if unknown, None where
            only some steps are measured, which last longer.
    """

    def __init__(self, keep: int) -> None:
        self.rows: collections.deque[dict[str, Any]] = collections.deque(maxlen=keep)
        self.count = 0
        self.step_seconds: float | None = None
        self._first: list[StepTimes] = []
        self._times: ComputeTimes
        self._sampled: SampledSteps | None = None
        self._num_skipped = 0
        self._calls, self._interval = 0, 1
        self._latest_reading: float | None = None

    def begin(self, times: ComputeTimes, sampled: SampledSteps | None = None) -> None:
        """Go on with the next step: those that nobody has read belong to another training.

        Args:
            times: where the steps are measured.
            sampled: the steps of which only some are.
        """
        times.read_new()
        self._times, self._sampled, self._num_skipped = times, sampled, 0
        self._calls, self._interval = 0, 1

    def pause(self) -> None:
        """Leave out the time until the next reading: it belongs to a validation, not to a step."""
        self._latest_reading = None

    def is_due(self) -> bool:
        if self._sampled is not None:
            self._num_skipped += not self._sampled.was_measured
            return self._sampled.was_measured
        self._calls += 1
        return self._calls >= self._interval

    def read(self, is_last: bool = False) -> list[Reading]:
        """Return the steps since the last call, oldest first.

        The very first step waits for the second, which shows whether it loaded kernels and memory:
        its times say nothing then.
        """
        steps = self._times.read_new()
        if not steps:
            return []
        self.count += self._num_skipped * len(steps)  # those of one call
        self._num_skipped = 0
        steps = [*self._first, *steps]
        if self.count == 0 and len(steps) < 2 and not is_last:
            self._first = steps
            return []
        self._first = []
        now, before = time.perf_counter(), self._latest_reading
        self._latest_reading = now
        if self._sampled is None:
            self.step_seconds = 0.0 if before is None else (now - before) / len(steps)
        warms_up = self.count == 0 and _is_warm_up(steps)
        readings = [self._reading(group) for group in self._groups(steps)]
        if warms_up:
            readings[0].seconds[:] = np.nan
        self._choose_interval(steps)
        return readings

    def _groups(self, steps: Sequence[StepTimes]) -> list[list[StepTimes]]:
        """Group short steps that were read together and had the same shares.

        Their median is less noisy than each, and costs a single decision.
        """
        if self._interval == 1:
            return [[step] for step in steps]
        by_shares = itertools.groupby(steps, lambda step: step.shares.tobytes())
        return [list(group) for _, group in by_shares]

    def _reading(self, steps: Sequence[StepTimes]) -> Reading:
        shares = steps[-1].shares
        _check_same_shares(shares, np.mean([step.mean_shares for step in steps], axis=0))
        # A replica without a share computes a row of zeros: its time says nothing about samples.
        seconds = np.array([np.where(shares > 0, step.seconds, np.nan) for step in steps])
        for each in seconds:
            row = {"step": self.count, "shares": shares.tolist(), "seconds": each.tolist()}
            self.rows.append(row)
            self.count += 1
        wanted = tuple(steps[-1].wanted_shares.tolist())
        return Reading(self.count - 1, shares, np.median(seconds, axis=0), wanted)

    def _choose_interval(self, steps: Sequence[StepTimes]) -> None:
        calls, self._calls = max(self._calls, 1), 0
        slowest = max(float(step.seconds.max()) for step in steps[-MOST_CALLS:])
        if slowest > 0:
            steps_each = max(len(steps) / calls, 1.0)
            wanted = math.ceil(LONG_STEP_SECONDS / slowest / steps_each)
            most = max(int(_MOST_STEPS / steps_each), 1)
            self._interval = max(1, min(wanted, MOST_CALLS, most))


def _is_warm_up(steps: Sequence[StepTimes]) -> bool:
    """Whether the first step took far longer than the second on all replicas."""
    if len(steps) < 2:
        return False
    first, second = steps[:2]
    used = (first.shares > 0) & (second.shares > 0)
    return bool((first.seconds[used] > _WARM_UP * second.seconds[used]).all())


def _check_same_shares(shares: IntArray, mean_shares: FloatArray) -> None:
    difference = np.abs(mean_shares - shares)
    if (difference > 1e-3 * np.maximum(shares, 1)).any():
        raise RuntimeError(
            "The workers cut the same global batch into different shares: samples were left out or "
            f"used twice. Received: shares {shares.tolist()} on this worker, "
            f"{mean_shares.round(2).tolist()} on average over all replicas. Use the same "
            "callbacks with the same arguments on every worker."
        )
