"""How often a worker exchanges with a center, and what one exchange costs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from keras_het.planning.argument_checks import check_number
from keras_het.planning.time_model import check_not_negative

LARGEST_OVERHEAD = 0.1
"""Fraction of its time that a task may be busy with exchanges whose period is planned."""
LARGEST_WAIT = 1.0
"""Times its computation that a task may wait for an exchange whose period is planned."""
# With 0, periods hide whole exchanges: most trainings of benchmarks/push_periods.py missed their
# target for the age of the weights.
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
    """Exchange settings of a training with async workers, as passed to `AsyncWorkers`.

    Args:
        period: steps of every task between two exchanges; None if each plans its own, as with
            `period="auto"`.
        least_period: steps that the slowest task takes at least, if each plans its own.
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
        TypeError: if `busy_seconds` is not a number.
        ValueError: if a number is out of range.
    """

    period: int | None = 8
    async_batch_size: int | None = None
    busy_seconds: float = 0.0
    sends_gradients: bool = False
    num_batches: int | None = None
    least_period: int = 1

    def __post_init__(self) -> None:
        check_not_negative("busy_seconds", self.busy_seconds)
        for name in ("period", "async_batch_size", "num_batches", "least_period"):
            check_number(name, getattr(self, name), least=1, or_none=True)


def periods_of(exchange: ExchangeSettings, pushers: Sequence[Pusher]) -> tuple[int, ...]:
    """Return the steps between two exchanges of all tasks that exchange, the sync group first."""
    if exchange.period is not None:
        return (exchange.period,) * len(pushers)
    batches = [max(1, round(pusher.batch_samples)) for pusher in pushers]
    waits = [pusher.travel_seconds if exchange.sends_gradients else 0.0 for pusher in pushers]
    plan = plan_pushes(
        [pusher.batch_samples / pusher.batch_seconds for pusher in pushers],
        batches,
        [
            exchange_to_plan(pusher.travel_seconds, pusher.busy_seconds + waited)
            for pusher, waited in zip(pushers, waits, strict=True)
        ],
        exchange.least_period,
    )
    periods = []
    for samples, batch, pusher in zip(plan.samples, batches, pushers, strict=True):
        longest: float = math.inf
        if exchange.num_batches is not None:
            longest = longest_period(exchange.num_batches * pusher.parts, exchange.least_period)
        periods.append(int(max(1, min(samples // batch, longest))))
    return tuple(periods)


def exchange_to_plan(travel_seconds: float, busy_seconds: float) -> float:
    """Return the time of an exchange, or of a longer one if the work for it asks for that."""
    return max(travel_seconds, (1 + LARGEST_WAIT) * busy_seconds / LARGEST_OVERHEAD)


def period_seconds(exchange: ExchangeSettings, pusher: Pusher, period: int) -> float:
    """Return the time from one exchange of a task to its next, that many steps later."""
    compute, travel = period * pusher.batch_seconds, pusher.travel_seconds
    hidden = compute + travel if exchange.sends_gradients else max(compute, travel)
    return hidden + pusher.busy_seconds


def mean_age_in_periods(exchange: ExchangeSettings, pusher: Pusher, period: int) -> float:
    """Return the mean time over a push's steps from their starting point to its arrival."""
    # Steps before the answer to the previous push arrives start from an older center.
    if exchange.sends_gradients:
        return 1.0
    steps = max(1, math.ceil(pusher.travel_seconds / pusher.batch_seconds))
    return 1.0 + min(steps, period) / period


def longest_period(num_steps: int, least_period: int = 1) -> int:
    """Return the bound of a planned period in an epoch of some steps."""
    # A rule that asks for long periods knows better: only the end of the epoch bounds them.
    return max(1, num_steps // EXCHANGES_AN_EPOCH if least_period == 1 else num_steps)


@dataclasses.dataclass(frozen=True)
class PushPlan:
    """Number of samples every pusher accumulates for one push.

    A pusher is an async worker, or the sync group as a whole.

    Args:
        target_seconds: target time of computation between pushes.
        samples: samples of one push of every pusher, A_i; a multiple of its batch.
        push_seconds: predicted time between two pushes of every pusher.
    """

    target_seconds: float
    samples: tuple[int, ...]
    push_seconds: tuple[float, ...]


def plan_pushes(
    samples_per_second: Sequence[float],
    batch_samples: Sequence[int],
    exchange_seconds: Sequence[float],
    least_batches: int = 1,
) -> PushPlan:
    r"""Choose the samples of one push for all pushers, for about equal push rates.

    Pushers compute while they exchange: with speed s and an exchange of e seconds, the time between
    two pushes of A samples is :math:`\max(A / s, e)`. Nobody computes for less than half an
    exchange: steps that hide all of it would start from a center that is twice as old. The target
    is the shortest computation between two pushes that all can sustain: `least_batches`, and half
    an exchange, of the slowest pusher. Of the two neighboring numbers of batches, the one whose
    time is closer to the target in ratio is chosen.

    Args:
        samples_per_second: speed of every pusher; the sync group is one pusher.
        batch_samples: samples of one step of every pusher; for the sync group, its global batch.
        exchange_seconds: time of one push and pull; 0 if the parameter service is embedded.
        least_batches: batches that the slowest pusher accumulates at least, such as the local steps
            of DiLoCo.

    Returns:
        The plan. The computation between two pushes misses the target by at most a factor
        sqrt(1 + 1 / k) for k batches.

    Raises:
        TypeError: if a speed or a time is not a number.
        ValueError: if the lists differ in length or are empty, a speed or batch is not positive, or
            an exchange time is negative.

    Reference:
        The idea of pushing at a common rate: Kim et al., Cluster Computing 23, 2020; reconstructed.
    """
    if not len(samples_per_second) == len(batch_samples) == len(exchange_seconds) > 0:
        raise ValueError(
            "Every pusher needs a speed, a batch and a time of exchange. Received: "
            f"{len(samples_per_second)} speeds, {len(batch_samples)} batches and "
            f"{len(exchange_seconds)} times of exchange. Give 0.0 where nothing is exchanged."
        )
    pushers = list(zip(samples_per_second, batch_samples, exchange_seconds, strict=True))
    for speed, batch, exchange in pushers:
        check_not_negative("samples_per_second", speed)
        check_not_negative("exchange_seconds", exchange)
        if not speed or batch != int(batch) or batch < 1:
            raise ValueError(
                "Every pusher needs a speed above 0 and a batch of a whole number of samples, at "
                f"least 1. Received: samples_per_second={speed!r}, batch_samples={batch!r}. "
                "Measure the worker, or leave it out."
            )
    check_number("least_batches", least_batches, least=1)
    halves = [exchange / (1 + LARGEST_WAIT) for _, _, exchange in pushers]
    target = max(least_batches * batch / speed for speed, batch, _ in pushers)
    target = max(target, *halves)
    samples = tuple(
        _pushed_samples(speed, batch, half, target)
        for (speed, batch, _), half in zip(pushers, halves, strict=True)
    )
    return PushPlan(
        target_seconds=target,
        samples=samples,
        push_seconds=tuple(
            max(pushed / speed, exchange)
            for pushed, (speed, _, exchange) in zip(samples, pushers, strict=True)
        ),
    )


def _pushed_samples(speed: float, batch: int, least_seconds: float, target: float) -> int:
    seconds = batch / speed
    fewer = max(1, math.floor(target / seconds))
    below, above = fewer * seconds, (fewer + 1) * seconds
    batches = fewer if below * above >= target**2 else fewer + 1
    # 1e-9: a quotient that is whole except for rounding.
    return max(batches, math.ceil(least_seconds / seconds - 1e-9)) * int(batch)
