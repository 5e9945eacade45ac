"""Local steps and compression of an async worker, from times measured by all workers."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from keras_het.asynchronous.exchange.push_pace import Pace
from keras_het.asynchronous.rules import UpdateRule

_KEPT_TIMES = 5


class OwnPlan(NamedTuple):
    """One worker's plan between two exchanges."""

    steps: int
    ratio: float


class LocalStepTuner:
    """The plan of this worker, by a rule that derives it from measured times.

    Until a step and an exchange have been measured, it uses the rule's preset steps and sends all
    values. The times of all workers are in the sample ledger; each makes its own plan from the same
    table.
    """

    def __init__(
        self, rule: UpdateRule, participant: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._rule, self._participant, self._clock = rule, participant, clock
        self._pulls: deque[float] = deque(maxlen=_KEPT_TIMES)
        self._pushes: deque[tuple[float, float]] = deque(maxlen=_KEPT_TIMES)
        self._chosen: tuple[OwnPlan, OwnPlan] | None = None
        self._num_pushes = 0
        self._sent_at = self._seconds = 0.0
        self._part = 1.0

    def steps(self, stage: int) -> int | None:
        """Return the local steps of a stage, None before the first plan."""
        return None if self._chosen is None else self._chosen[stage].steps

    def next_ratio(self, stage: int) -> float:
        """Return the fraction of the values in the following messages, by the latest plan."""
        if self._chosen is not None:
            self._part = self._chosen[stage].ratio
        return self._part

    def sent(self) -> None:
        """Record that a message leaves now."""
        self._sent_at = self._clock()

    def answered(self) -> None:
        """Record that an answer has arrived."""
        self._seconds = self._clock() - self._sent_at

    def took_at_once(self) -> None:
        """Record that the answer was the center: the worker did not have to wait for its turn."""
        self._num_pushes += 1
        if self._num_pushes > 1:  # the first one is traced
            self._pushes.append((self._seconds, self._part))

    def pull(self, pull: Callable[[], object]) -> None:
        """Measure how long the center takes to arrive."""
        started = self._clock()
        pull()
        self._pulls.append(self._clock() - started)

    def pace(self, pace: Pace) -> Pace | None:
        """Extend a worker's pace by the time of an exchange in which all values are sent."""
        if not self._pushes or not self._pulls:
            return None
        pull = statistics.median(self._pulls)
        full = statistics.median(max(both - pull, 0.0) / part for both, part in self._pushes)
        return pace._replace(exchange_seconds=full + pull, pull_seconds=pull)

    def choose(self, paces: np.ndarray, silence: np.ndarray, longest_silence: float) -> None:
        """Make the plan of both stages."""
        paces = np.asarray(paces, np.float64)
        counts = (paces[:, 0] > 0) & (paces[:, 1] >= 1) & (np.asarray(silence) < longest_silence)
        counts[self._participant] = True
        speeds, batches, exchanges, pulls = paces[counts].T[:4]  # the rest is for people
        pushes = np.maximum(exchanges - pulls, 0.0)
        place = int(counts[: self._participant].sum())
        plans = [self._rule.plan(batches / speeds, pushes, pulls, stage) for stage in (0, 1)]
        first, second = (
            OwnPlan(plan.steps[place], plan.compression_ratios[place])
            for plan in plans
            if plan is not None
        )
        self._chosen = first, second
