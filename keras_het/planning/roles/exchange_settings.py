r"""Frequency of a worker's exchanges with a center, and the cost of one exchange.

A task is busy with an exchange for c seconds, in which it computes nothing, and the weights need e
seconds for the round trip. If e is hidden behind the computation of the next period, p batches of t
seconds make a period of :math:`\max(p t, e) + c`; a worker that needs the answer to continue takes
:math:`p t + e + c`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from keras_het.planning.roles.push_rates import plan_pushes
from keras_het.planning.times.time_model import check_not_negative

LARGEST_OVERHEAD = 0.1
"""Fraction of its time that a task may be busy with exchanges whose period is planned."""
EXCHANGES_AN_EPOCH = 8
"""A planned period is short enough for at least this many."""


class Pusher(NamedTuple):
    """A task that exchanges: an async worker, or the sync group."""

    batch_samples: float
    batch_seconds: float
    travel_seconds: float
    busy_seconds: float
    parts: int


@dataclasses.dataclass(frozen=True)
class ExchangeSettings:
    """Exchange settings of a training with async workers, as passed to `HybridAggregation`.

    Args:
        period: steps of every task between two exchanges; None if each plans its own, as with
            `period="auto"`.
        async_period: the same for async workers, if the rule gives them another one.
        async_batch_size: samples in each of an async worker's steps; None for the global batch over
            the number of members of the sync group.
        busy_seconds: time that a task itself needs for one exchange, such as reading and writing
            its weights, during which it computes nothing; 0 if unknown.
        sends_gradients: whether a worker sends the mean gradient of a period and waits for the
            answer; otherwise it runs its own optimizer and takes the answer after the step in which
            it arrives.
        num_batches: number of global batches in an epoch, which bounds a planned period; None for
            no bound.

    Raises:
        TypeError: if an argument is not a number.
        ValueError: if a number is out of range.
    """

    period: int | None = 8
    async_batch_size: int | None = None
    busy_seconds: float = 0.0
    sends_gradients: bool = False
    num_batches: int | None = None
    async_period: int | None = None

    def __post_init__(self) -> None:
        check_not_negative("busy_seconds", self.busy_seconds)
        for name in ("period", "async_batch_size", "num_batches", "async_period"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(
                    f"`{name}` must be at least 1. Received: {name}={value!r}. Leave it out, or "
                    "give what `HybridAggregation` gets."
                )

    def parts(self, global_batch: int, members: int) -> int:
        """Return the number of steps that an async worker makes of a global batch.

        Args:
            global_batch: its number of samples.
            members: number of workers in the sync group.
        """
        if self.async_batch_size is None:
            return members
        return math.ceil(global_batch / self.async_batch_size)

    def periods(self, pushers: Sequence[Pusher]) -> tuple[int, ...]:
        """Return the steps of every task between two exchanges.

        Args:
            pushers: all tasks that exchange, the sync group first.
        """
        if self.period is not None:
            return (self.period, *[self.async_period or self.period] * (len(pushers) - 1))
        batches = [max(1, round(own.batch_samples)) for own in pushers]
        plan = plan_pushes(
            [own.batch_samples / own.batch_seconds for own in pushers],
            batches,
            [self._least_seconds(own) for own in pushers],
        )
        return tuple(
            max(1, self._limited(samples // batch, own.parts))
            for samples, batch, own in zip(plan.samples, batches, pushers, strict=True)
        )

    def period_seconds(self, pusher: Pusher, period: int) -> float:
        """Return the time from one exchange of a task to its next.

        Args:
            pusher: the task.
            period: its number of steps between them.
        """
        compute, travel = period * pusher.batch_seconds, pusher.travel_seconds
        hidden = compute + travel if self.sends_gradients else max(compute, travel)
        return hidden + pusher.busy_seconds

    def mean_age_in_periods(self, pusher: Pusher, period: int) -> float:
        """Return the mean time over a push's steps from their starting point to its arrival.

        Steps before the answer to the previous push arrives start from an older center.

        Args:
            pusher: an async worker.
            period: its number of steps between two exchanges.
        """
        if self.sends_gradients:
            return 1.0
        steps = max(1, math.ceil(pusher.travel_seconds / pusher.batch_seconds))
        return 1.0 + min(steps, period) / period

    def _least_seconds(self, pusher: Pusher) -> float:
        waits = pusher.travel_seconds if self.sends_gradients else 0.0
        return max(pusher.travel_seconds, (pusher.busy_seconds + waits) / LARGEST_OVERHEAD)

    def _limited(self, period: int, parts: int) -> int:
        if self.num_batches is None:
            return period
        return min(period, longest_period(self.num_batches * parts))


def longest_period(num_steps: int) -> int:
    """Return the longest period of a task whose period is planned."""
    return max(1, num_steps // EXCHANGES_AN_EPOCH)
