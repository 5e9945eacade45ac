"""Measure the speed of this task's computation and exchanges, and set its push rate."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from keras_het.planning import plan_pushes
from keras_het.planning.roles.exchange_settings import LARGEST_OVERHEAD

FIRST_PERIOD = 4
"""Steps between two exchanges until the first plan."""
_WARM_UP_STEPS = 2
_NOTICEABLE_SECONDS = 1e-3
_EXCHANGES_TO_PLAN = 8


class Pace(NamedTuple):
    """The speed of a pusher."""

    samples_per_second: float
    batch_samples: float
    exchange_seconds: float
    pull_seconds: float = 0.0
    answer_seconds: float = 0.0
    staleness: float = 0.0


class PushPace:
    r"""The pace of this task, from its latest steps and exchanges.

    An exchange that takes e seconds, during c of which the task itself is busy, should hide behind
    computation and cost a tenth of it at most: pushes are at least :math:`\max(e, 10 c)` seconds
    apart. A task that needs the answer to continue is busy all the time, c = e.
    """

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, *, waits: bool = False
    ) -> None:
        self._clock, self._waits = clock, waits
        self._since = clock()
        self._num_steps = self._num_exchanges = 0
        self._steps: deque[tuple[float, float]] = deque(maxlen=32)
        self._travels: deque[float] = deque(maxlen=3)
        self._overheads: deque[float] = deque(maxlen=8)
        self._answers: deque[float] = deque(maxlen=8)
        self._waited = self._took_early = 0.0
        self._sent_at: float | None = None

    def computed(self, steps: int, samples: int) -> None:
        """Record steps that have just ended."""
        now = self._clock()
        seconds, self._since = now - self._since, now
        self._num_steps += steps
        # The first steps are traced; a step without samples says nothing.
        if self._num_steps > _WARM_UP_STEPS and samples:
            self._steps.append((seconds / steps, samples / steps))

    @contextlib.contextmanager
    def exchanging(self) -> Iterator[None]:
        """Time this task's work for an exchange; `waiting` within it may be hidden."""
        started, self._waited = self._clock(), 0.0
        yield
        self._since = self._clock()
        hidden = 0.0 if self._waits else self._waited
        if self._num_exchanges:  # the first one is traced
            self._overheads.append(self._since - started - hidden + self._took_early)
        self._num_exchanges += 1
        self._took_early = 0.0

    @contextlib.contextmanager
    def taking_early(self) -> Iterator[None]:
        """Time this task's work on an answer that arrives before the next exchange."""
        started = self._clock()
        yield
        self._since = self._clock()
        self._took_early += self._since - started

    def sent(self) -> None:
        """Record that a message leaves now."""
        self._sent_at = self._clock()

    @contextlib.contextmanager
    def waiting(self, measures: bool = False) -> Iterator[None]:
        """Time the wait for the answer; a wait reveals the time of the exchange."""
        started = self._clock()
        yield
        now = self._clock()
        self._waited += now - started
        if self._sent_at is not None:
            self._answers.append(now - self._sent_at)
        if self._sent_at is not None and (measures or now - started > _NOTICEABLE_SECONDS):
            self._travels.append(now - self._sent_at)
        self._sent_at = None

    @property
    def is_due(self) -> bool:
        """Whether to measure an exchange and plan: at first, then occasionally."""
        return self._num_exchanges < 2 or self._num_exchanges % _EXCHANGES_TO_PLAN == 0

    @property
    def pace(self) -> Pace | None:
        """The measured pace; None before the first steps that count."""
        if not self._steps:
            return None
        step = statistics.median(seconds for seconds, _ in self._steps)
        batch = statistics.median(samples for _, samples in self._steps)
        travel = statistics.median(self._travels) if self._travels else 0.0
        busy = statistics.median(self._overheads) if self._overheads else 0.0
        answer = statistics.median(self._answers) if self._answers else 0.0
        exchange = max(travel, busy / LARGEST_OVERHEAD)
        return Pace(batch / max(step, 1e-9), batch, exchange, answer_seconds=answer)


def choose_period(
    paces: np.ndarray, silence: np.ndarray, participant: int, limits: tuple[float, int]
) -> int:
    """Return the steps of one pusher between two exchanges, for about equal push rates."""
    paces, longest_silence = np.asarray(paces), limits[0]
    counts = (paces[:, 0] > 0) & (paces[:, 1] >= 1) & (np.asarray(silence) < longest_silence)
    counts[participant] = paces[participant, 0] > 0 and paces[participant, 1] >= 1
    if not counts[participant]:
        return FIRST_PERIOD
    speeds, batches, exchanges = paces[counts].T[:3]
    batches = [round(batch) for batch in batches]
    plan = plan_pushes(speeds.tolist(), batches, exchanges.tolist())
    place = int(counts[:participant].sum())
    return max(1, min(plan.samples[place] // batches[place], limits[1]))
