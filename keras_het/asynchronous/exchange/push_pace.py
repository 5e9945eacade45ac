"""Measures how fast this task computes and exchanges, and chooses how often it pushes."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from keras_het.planning import plan_pushes
from keras_het.planning.roles.exchange_settings import LARGEST_OVERHEAD

FIRST_PERIOD = 4
"""Steps between two exchanges until the first plan."""
_WARM_UP_STEPS = 2
_NOTICEABLE_SECONDS = 1e-3
_EXCHANGES_TO_PLAN = 8


class Pace(NamedTuple):
    """How fast a pusher is.

    Attributes:
        samples_per_second: while it computes.
        batch_samples: samples of one step.
        exchange_seconds: least time between two pushes; for rules that make their plan of times,
            time of an exchange in which all values are sent.
        pull_seconds: the part of it in which the center comes, for those rules.
    """

    samples_per_second: float
    batch_samples: float
    exchange_seconds: float
    pull_seconds: float = 0.0


class PushPace:
    r"""The pace of this task, from its latest steps and exchanges.

    An exchange that takes e seconds, of which the task itself is busy for c, should lie behind
    computation, and cost a tenth of it at most: pushes are :math:`\max(e, 10 c)` seconds apart or
    more. A task that goes on only with the answer is busy all the while, c = e.

    Args:
        clock: in seconds.
        waits: whether the task computes nothing while its message travels.
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
        self._waited = self._took_early = 0.0
        self._sent_at: float | None = None

    def computed(self, steps: int, samples: int) -> None:
        """Notes steps that have ended now.

        Args:
            steps: since the last call.
            samples: of all of them.
        """
        now = self._clock()
        seconds, self._since = now - self._since, now
        self._num_steps += steps
        # the first steps are traced; one without samples says nothing
        if self._num_steps > _WARM_UP_STEPS and samples:
            self._steps.append((seconds / steps, samples / steps))

    @contextlib.contextmanager
    def exchanging(self) -> Iterator[None]:
        """Around what this task does for an exchange; `waiting` in it may be hidden."""
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
        """Around what this task does with an answer that is there before the next exchange."""
        started = self._clock()
        yield
        self._since = self._clock()
        self._took_early += self._since - started

    def sent(self) -> None:
        """Notes that a message leaves now."""
        self._sent_at = self._clock()

    @contextlib.contextmanager
    def waiting(self, measures: bool = False) -> Iterator[None]:
        """Around waiting for the answer; if it took time, the time of the exchange is known.

        Args:
            measures: whether waiting began with the message, so that it is known in any case.
        """
        started = self._clock()
        yield
        now = self._clock()
        self._waited += now - started
        if self._sent_at is not None and (measures or now - started > _NOTICEABLE_SECONDS):
            self._travels.append(now - self._sent_at)
        self._sent_at = None

    @property
    def is_due(self) -> bool:
        """Whether it is time to measure an exchange and to plan: at first, then now and then."""
        return self._num_exchanges < 2 or self._num_exchanges % _EXCHANGES_TO_PLAN == 0

    @property
    def pace(self) -> Pace | None:
        """What was measured; None before the first steps that count."""
        if not self._steps:
            return None
        step = statistics.median(seconds for seconds, _ in self._steps)
        batch = statistics.median(samples for _, samples in self._steps)
        travel = statistics.median(self._travels) if self._travels else 0.0
        busy = statistics.median(self._overheads) if self._overheads else 0.0
        return Pace(batch / max(step, 1e-9), batch, max(travel, busy / LARGEST_OVERHEAD))


def choose_period(paces: Any, silence: Any, client: int, limits: tuple[float, int]) -> int:
    """Steps of one pusher between two exchanges, so that all push at about the same rate.

    Args:
        paces: `Pace` of every client, float64 of shape [num_clients, 4]; zeros: not known.
        silence: seconds since each was heard of, float64 of shape [num_clients].
        client: whose period.
        limits: silence of a client that counts no more, in seconds, and the longest period.

    Returns:
        The period; `FIRST_PERIOD` if this client's pace is not known.
    """
    paces, longest_silence = np.asarray(paces), limits[0]
    counts = (paces[:, 0] > 0) & (paces[:, 1] >= 1) & (np.asarray(silence) < longest_silence)
    counts[client] = paces[client, 0] > 0 and paces[client, 1] >= 1
    if not counts[client]:
        return FIRST_PERIOD
    speeds, batches, exchanges = paces[counts].T[:3]
    batches = [round(batch) for batch in batches]
    plan = plan_pushes(speeds.tolist(), batches, exchanges.tolist())
    place = int(counts[:client].sum())
    return max(1, min(plan.samples[place] // batches[place], limits[1]))
