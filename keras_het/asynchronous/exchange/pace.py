"""The measured speed of this task, and the steps between its exchanges that follow from it."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from keras_het.planning import plan_pushes
from keras_het.planning.roles.exchange_settings import exchange_to_plan

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
    answer_seconds: float = 0.0
    staleness: float = 0.0


class PushPace:
    """The pace of this task, from its latest steps and exchanges."""

    # Between two exchanges of e seconds, for c of which this task is busy, it computes for at least
    # max(e / 2, 10 c). Whoever waits for each answer has c = e.

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        *,
        waits: bool = False,
        wait_for_devices: Callable[[], None] | None = None,
    ) -> None:
        self._clock, self._waits, self._wait_for_devices = clock, waits, wait_for_devices
        self._since = clock()
        self._open_steps = self._open_samples = 0
        self._num_steps = self._num_exchanges = 0
        self._steps: deque[tuple[float, float]] = deque(maxlen=32)
        self._travels: deque[float] = deque(maxlen=3)
        self._overheads: deque[float] = deque(maxlen=8)
        self._answers: deque[float] = deque(maxlen=8)
        self._waited = self._busy = 0.0
        self._sent_at: float | None = None

    def computed(self, steps: int, samples: int) -> None:
        self._open_steps += steps
        self._open_samples += samples
        if self._wait_for_devices is None:
            self._note_steps()

    def _note_steps(self) -> None:
        steps, samples = self._open_steps, self._open_samples
        self._open_steps = self._open_samples = 0
        if not steps:
            return
        if self._wait_for_devices is not None:
            self._wait_for_devices()
        now = self._clock()
        seconds, self._since = now - self._since, now
        self._num_steps += steps
        # The first steps are traced; a step without samples says nothing.
        if self._num_steps - steps >= _WARM_UP_STEPS and samples:
            self._steps.append((seconds / steps, samples / steps))

    @contextlib.contextmanager
    def taking_early(self) -> Iterator[None]:
        """Time this task's work on an answer that arrives before the next exchange."""
        self._note_steps()
        started, self._waited = self._clock(), 0.0
        yield
        self._since = self._clock()
        hidden = 0.0 if self._waits else self._waited
        self._busy += self._since - started - hidden

    @contextlib.contextmanager
    def exchanging(self) -> Iterator[None]:
        """Time this task's work for an exchange; `waiting` within it may be hidden."""
        with self.taking_early():
            yield
        if self._num_exchanges:  # the first one is traced
            self._overheads.append(self._busy)
        self._num_exchanges += 1
        self._busy = 0.0

    def sent(self) -> None:
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
        if not self._steps:
            return None
        step, batch = map(statistics.median, zip(*self._steps, strict=True))
        others = (self._travels, self._overheads, self._answers)
        travel, busy, answer = (statistics.median(found or [0.0]) for found in others)
        exchange = exchange_to_plan(travel, busy)
        return Pace(batch / max(step, 1e-9), batch, exchange, answer_seconds=answer)


def choose_period(
    paces: np.ndarray,
    silence: np.ndarray,
    participant: int,
    limits: tuple[float, int],
    least: int = 1,
) -> int:
    """Return the steps of one participant between two exchanges, for about equal push rates."""
    # Limits: the silence in seconds after which a participant does not count, the longest period.
    paces = np.asarray(paces, np.float64)
    is_known = (paces[:, 0] > 0) & (paces[:, 1] >= 1)
    counts = is_known & (np.asarray(silence) < limits[0])
    if not is_known[participant]:
        return max(FIRST_PERIOD, least)
    counts[participant] = True
    speeds, batches, exchanges = paces[counts].T[:3]
    batches = [round(batch) for batch in batches]
    plan = plan_pushes(speeds.tolist(), batches, exchanges.tolist(), least)
    place = int(counts[:participant].sum())
    return max(1, min(plan.samples[place] // batches[place], limits[1]))
