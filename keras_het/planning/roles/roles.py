"""Who is in the sync group, who is asynchronous, and who is left out, by predicted samples/s."""

# A step of a sync group takes min_b max_i (f_i + b_i / s_i) + 2 (m - 1) (h + M / (m min_i L_i)),
# with m workers, global batch B = sum b, M bytes, speeds s, fixed times f, link rates L and the
# time h of an empty message. Async workers cut global batches into smaller steps and exchange every
# p of these, which costs the group an all-reduce and its own work. The model is specific to this
# package.

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Literal

from keras_het.planning.balance.min_max import min_max_shares_linear
from keras_het.planning.roles.exchange_settings import (
    ExchangeSettings,
    Pusher,
    mean_age_in_periods,
    period_seconds,
    periods_of,
)
from keras_het.planning.time_model import check_not_negative

Role = Literal["sync", "async", "out"]
Mode = Literal["balanced", "leave_out", "hybrid"]

NOISE_SCALE_IN_GLOBAL_BATCHES = 16.0
"""Gradient noise scale assumed without a measurement."""
CLEARLY_SLOWER = 0.1
"""An async worker computes slower by this fraction than every member of the sync group, or would
lengthen the group's steps by this fraction through its link."""

HYBRID_MARGIN = 0.02
"""Gain over the best synchronous mode above which workers become asynchronous.

On the benchmarks' four clusters, hybrid's gain in time to target was predicted between 21 %
too low, with hops measured by steps, and 3 % too high, with hops fitted to other steps (medians
of the runs of a cluster; 22 % too low for the worker at an eighth, where it does not pay). It is
small because the simpler mode trains equal workers better.
"""


@dataclasses.dataclass(frozen=True)
class ClusterSpeeds:
    """Measured speeds of a cluster, in the order of its workers.

    Args:
        samples_per_second: speed of every worker's computation.
        link_bytes_per_second: rate of every worker's link to the others, in each direction.
        model_bytes: bytes of the gradients, and of the weights, that travel.
        global_batch_size: samples of a step of the sync group.
        fixed_seconds: the part of every worker's step time that does not depend on its samples; by
            default 0.
        noise_scale: gradient noise scale in samples; by default 16 global batches, which is an
            assumption, not a measurement.
        hop_seconds: time of a message between two workers in addition to that of its bytes; an
            all-reduce of m workers has 2 (m - 1) of them in sequence; 0 if unknown.
        exchange: exchange settings of a training with async workers; by default every 8 steps, at
            no cost to the task itself.

    Raises:
        TypeError: if an argument is not a number.
        ValueError: if there is no worker, the lists differ in length, or a number is out of range.
    """

    samples_per_second: tuple[float, ...]
    link_bytes_per_second: tuple[float, ...]
    model_bytes: int
    global_batch_size: int
    fixed_seconds: tuple[float, ...] = ()
    noise_scale: float | None = None
    hop_seconds: float = 0.0
    exchange: ExchangeSettings = dataclasses.field(default_factory=ExchangeSettings)

    def __post_init__(self) -> None:
        n = len(self.samples_per_second)
        if not self.fixed_seconds:
            object.__setattr__(self, "fixed_seconds", (0.0,) * n)
        if not 0 < n == len(self.link_bytes_per_second) == len(self.fixed_seconds):
            raise ValueError(
                "Every worker needs a speed, a link rate and, if any has one, a fixed time. "
                f"Received: {n} speeds, {len(self.link_bytes_per_second)} link rates and "
                f"{len(self.fixed_seconds)} fixed times. Measure all workers."
            )
        for name in ("samples_per_second", "link_bytes_per_second", "fixed_seconds"):
            for value in getattr(self, name):
                check_not_negative(name, value)
        check_not_negative("noise_scale", self.noise_scale or 0.0)
        check_not_negative("model_bytes", self.model_bytes)
        check_not_negative("hop_seconds", self.hop_seconds)
        rates = (*self.samples_per_second, *self.link_bytes_per_second)
        if min(rates) <= 0 or self.global_batch_size < 1:
            raise ValueError(
                "Speeds and link rates must be above 0, and the global batch at least 1. "
                f"Received: {self}. Leave out workers that do nothing."
            )

    def with_all_reduce_of(self, seconds: float) -> ClusterSpeeds:
        """Return the same cluster with hop times that match an all-reduce of all its workers.

        Args:
            seconds: duration of the all-reduce; `hop_seconds` is not below 0.
        """
        everyone = range(len(self.samples_per_second))
        num_hops = 2 * (len(everyone) - 1)
        travel = _all_reduce_seconds(dataclasses.replace(self, hop_seconds=0.0), everyone)
        hop = max(0.0, seconds - travel) / num_hops if num_hops else 0.0
        return dataclasses.replace(self, hop_seconds=hop)

    @property
    def even_share_seconds(self) -> tuple[float, ...]:
        """Computation time of an even share of the global batch on every worker."""
        even = self.global_batch_size / len(self.samples_per_second)
        return tuple(
            fixed + even / speed
            for fixed, speed in zip(self.fixed_seconds, self.samples_per_second, strict=True)
        )


@dataclasses.dataclass(frozen=True)
class ModePrediction:
    """The prediction for one mode with its best roles.

    Args:
        mode: "balanced" (all in the sync group), "leave_out" (some not used) or "hybrid" (some
            asynchronous).
        roles: the role of every worker.
        samples_per_second: samples that all workers compute.
        effective_samples_per_second: the same, discounted for staleness.
        step_seconds: time of one step of the sync group, including its part of an exchange.
    """

    mode: Mode
    roles: tuple[Role, ...]
    samples_per_second: float
    effective_samples_per_second: float
    step_seconds: float

    def workers(self, role: Role) -> list[int]:
        """Return the workers that have a role.

        Args:
            role: the role.
        """
        return [i for i, own in enumerate(self.roles) if own == role]


@dataclasses.dataclass(frozen=True)
class RolePlan:
    """The role of every worker, and the prediction for each mode.

    `str(plan)` explains the choice in one line.

    Args:
        predictions: the best roles of every mode tried, simplest mode first.
        chosen: the prediction whose roles are used.
        margin: gain of leave_out up to which balanced is preferred.
        hybrid_margin: gain of hybrid up to which the other modes are preferred.
    """

    predictions: tuple[ModePrediction, ...]
    chosen: ModePrediction
    margin: float
    hybrid_margin: float

    @property
    def mode(self) -> Mode:
        """The chosen mode."""
        return self.chosen.mode

    @property
    def roles(self) -> tuple[Role, ...]:
        """The role of every worker."""
        return self.chosen.roles

    @property
    def samples_per_second(self) -> dict[str, float]:
        """Predicted samples per second of every mode."""
        return {p.mode: p.samples_per_second for p in self.predictions}

    @property
    def effective_samples_per_second(self) -> dict[str, float]:
        """Predicted samples per second of every mode, discounted for staleness; these decide."""
        return {p.mode: p.effective_samples_per_second for p in self.predictions}

    def __str__(self) -> str:
        names = {"sync": "sync group", "async": "asynchronous", "out": "left out"}
        groups = (
            f"{name} {', '.join(map(str, self.chosen.workers(role)))}"
            for role, name in names.items()
            if role in self.roles
        )
        predicted = (
            f"{p.mode} {p.effective_samples_per_second:.4g} (computed {p.samples_per_second:.4g})"
            for p in self.predictions
        )
        return (
            f"{self.mode} (workers: {'; '.join(groups)}). Predicted effective samples/s: "
            f"{', '.join(predicted)}; balanced if leave_out gains no more than {self.margin:.0%}, "
            f"hybrid if it gains more than {self.hybrid_margin:.0%}."
        )


def advise_roles(
    cluster: ClusterSpeeds, margin: float = 0.05, hybrid_margin: float = HYBRID_MARGIN
) -> RolePlan:
    """Choose between all workers in the sync group, some left out, and some asynchronous.

    Every mode is predicted with the best of `sync_groups`. (Among all groups, the choice would have
    gained more than 1 % for 4 of 300 random clusters of 2 to 7 workers.) For hybrid, the others
    become asynchronous in ascending or descending order of the age of their pushes, while that
    helps. Hybrid is chosen if it gains more than its own margin over the better of the other modes,
    which are predicted more accurately; otherwise balanced, if leave_out gains no more than the
    margin.

    Args:
        cluster: measured speeds.
        margin: gain of leave_out up to which balanced is preferred, at least 0.
        hybrid_margin: gain of hybrid up to which the other modes are preferred, at least 0.

    Returns:
        The plan. A single worker has only the mode balanced; equal workers have no hybrid.

    Raises:
        TypeError: if a margin is not a number.
        ValueError: if a margin is negative or not finite.
    """
    check_not_negative("margin", margin)
    check_not_negative("hybrid_margin", hybrid_margin)
    everyone = range(len(cluster.samples_per_second))
    predictions = [predict_sync(cluster, everyone)]
    if len(everyone) > 1:
        groups = [predict_sync(cluster, group) for group in sync_groups(cluster)]
        hybrids = [best_hybrid(cluster, group) for group in groups]
        found = [hybrid for hybrid in hybrids if hybrid is not None]
        predictions += [_best(each) for each in (groups, found) if each]
    chosen = _chosen(predictions, margin, hybrid_margin)
    return RolePlan(tuple(predictions), chosen, margin, hybrid_margin)


def _chosen(
    predictions: Sequence[ModePrediction], margin: float, hybrid_margin: float
) -> ModePrediction:
    exact = [p for p in predictions if p.mode != "hybrid"]
    best = max(p.effective_samples_per_second for p in exact)
    for hybrid in predictions[len(exact) :]:
        if hybrid.effective_samples_per_second > best * (1 + hybrid_margin):
            return hybrid
    return next(p for p in exact if p.effective_samples_per_second * (1 + margin) >= best)


def sync_groups(cluster: ClusterSpeeds) -> list[tuple[int, ...]]:
    """List candidates for the best sync group: the first by computation, by link, by both."""
    time, link = cluster.even_share_seconds, cluster.link_bytes_per_second
    workers = range(len(time))
    orders = (
        sorted(workers, key=lambda i: (time[i], -link[i])),
        sorted(workers, key=lambda i: (-link[i], time[i])),
        sorted(workers, key=lambda i: time[i] + 2 * cluster.model_bytes / link[i]),
    )
    return sorted({tuple(sorted(order[:size])) for order in orders for size in workers[1:]})


def best_hybrid(cluster: ClusterSpeeds, sync: ModePrediction) -> ModePrediction | None:
    """Choose the async workers for a sync group; None if nobody would hold it up."""
    order = sorted(
        _slower(cluster, sync), key=lambda i: _streams(cluster, sync, [i])[1].age_seconds
    )
    first = [order[: size + 1] for size in range(len(order))]
    # If staleness does harm, the slowest workers do the least.
    last = [order[size:] for size in range(1, len(order))]
    hybrids = [predict_hybrid(cluster, sync, beside) for beside in (*first, *last)]
    return _best(hybrids) if hybrids else None


def _slower(cluster: ClusterSpeeds, sync: ModePrediction) -> list[int]:
    """Return who is clearly slower than every member, in computation or in the link."""
    link, time = cluster.link_bytes_per_second, cluster.even_share_seconds
    group = sync.workers("sync")
    # A message there and back; rates of fast links differ by chance and cost nothing.
    allowed = CLEARLY_SLOWER * sync.step_seconds / (2 * max(cluster.model_bytes, 1))
    longest_message = 1 / min(link[i] for i in group) + allowed
    longest = max(time[i] for i in group) / (1 - CLEARLY_SLOWER)
    left_out = sync.workers("out")
    return [i for i in left_out if 1 / link[i] > longest_message or time[i] > longest]


def _best(predictions: Iterable[ModePrediction]) -> ModePrediction:
    return max(predictions, key=lambda p: p.effective_samples_per_second)


@dataclasses.dataclass(frozen=True)
class _PushedStream:
    """Work of one exchanging task, and its staleness on arrival."""

    samples_per_second: float
    step_seconds: float
    unseen_samples: float
    age_seconds: float


def predict_sync(cluster: ClusterSpeeds, members: Collection[int]) -> ModePrediction:
    """Predict a sync group with balanced shares; all other workers are left out."""
    group = sorted(members)
    fixed = [cluster.fixed_seconds[i] for i in group]
    per_sample = [1 / cluster.samples_per_second[i] for i in group]
    split = min_max_shares_linear(fixed, per_sample, cluster.global_batch_size).tolist()
    compute = max(
        f + a * b for f, a, b in zip(fixed, per_sample, split, strict=True) if b
    )  # a share of 0 takes no time
    step = compute + _all_reduce_seconds(cluster, group)
    workers = range(len(cluster.samples_per_second))
    return ModePrediction(
        mode="balanced" if len(group) == len(workers) else "leave_out",
        roles=tuple("sync" if i in group else "out" for i in workers),
        samples_per_second=cluster.global_batch_size / step,
        effective_samples_per_second=cluster.global_batch_size / step,
        step_seconds=step,
    )


def predict_hybrid(
    cluster: ClusterSpeeds, sync: ModePrediction, asynchronous: Sequence[int]
) -> ModePrediction:
    """Predict a sync group with async workers alongside it."""
    group, *beside = _streams(cluster, sync, asynchronous)
    everyone = sum(stream.samples_per_second for stream in (group, *beside))
    effective = sum(_effective(cluster, stream, everyone) for stream in (group, *beside))
    return ModePrediction(
        mode="hybrid",
        roles=tuple("async" if i in asynchronous else role for i, role in enumerate(sync.roles)),
        samples_per_second=everyone,
        effective_samples_per_second=effective,
        step_seconds=group.step_seconds,
    )


def statistical_efficiency(cluster: ClusterSpeeds, samples_in_flight: float) -> float:
    """Return the worth of a sample whose gradient arrives while others are in flight."""
    # The samples Q that a gradient does not reflect count as one batch: with a large noise scale
    # phi staleness is free; near 0, the worth approaches one over the batches in flight.
    batch = float(cluster.global_batch_size)
    noise = cluster.noise_scale
    phi = NOISE_SCALE_IN_GLOBAL_BATCHES * batch if noise is None else noise
    return (phi + batch) / (phi + max(batch, samples_in_flight))


def _effective(cluster: ClusterSpeeds, stream: _PushedStream, everyone: float) -> float:
    """Discount a stream for the others' samples that it has not seen; it knows its own steps."""
    others = everyone - stream.samples_per_second
    unseen = stream.unseen_samples + others * stream.age_seconds
    return stream.samples_per_second * statistical_efficiency(cluster, unseen)


def _streams(
    cluster: ClusterSpeeds, sync: ModePrediction, asynchronous: Sequence[int]
) -> list[_PushedStream]:
    """Return the stream of the sync group, then those of the async workers."""
    group = sync.workers("sync")
    exchange, busy = cluster.exchange, cluster.exchange.busy_seconds
    batch = float(cluster.global_batch_size)
    # An all-reduce passes the leader's update to the others, and all of them wait for it.
    passing_on = busy + _all_reduce_seconds(cluster, group)
    parts = len(group)
    if exchange.async_batch_size is not None:
        parts = math.ceil(cluster.global_batch_size / exchange.async_batch_size)
    pushers = [Pusher(batch, sync.step_seconds, 0.0, passing_on, 1)]
    for i in asynchronous:
        seconds = cluster.fixed_seconds[i] + batch / parts / cluster.samples_per_second[i]
        travel = _travel_seconds(cluster, sync, i, len(asynchronous))
        pushers.append(Pusher(batch / parts, seconds, travel, busy, parts))
    streams = []
    for pusher, period in zip(pushers, periods_of(exchange, pushers), strict=True):
        seconds, pushed = period_seconds(exchange, pusher, period), period * pusher.batch_samples
        # The center is in the group's own memory.
        in_memory = pusher is pushers[0]
        age = 1.0 if in_memory else mean_age_in_periods(exchange, pusher, period)
        stream = _PushedStream(
            samples_per_second=pushed / seconds,
            step_seconds=seconds / period,
            # With a local optimizer, every step starts from the previous one.
            unseen_samples=pushed if exchange.sends_gradients else pusher.batch_samples,
            age_seconds=age * seconds,
        )
        streams.append(stream)
    return streams


def _travel_seconds(
    cluster: ClusterSpeeds, sync: ModePrediction, worker: int, num_async: int
) -> float:
    """Return the time of a simultaneous push and pull over the slower of both links."""
    # The service is on the member with the fastest link, of which async workers share what the all-
    # reduce leaves.
    group = sync.workers("sync")
    leader = max(cluster.link_bytes_per_second[i] for i in group)
    # Above 0, because no all-reduce fills the time of the computation.
    left = leader - ring_bytes(cluster.model_bytes, len(group)) / sync.step_seconds
    return cluster.model_bytes / min(cluster.link_bytes_per_second[worker], left / num_async)


def _all_reduce_seconds(cluster: ClusterSpeeds, group: Sequence[int]) -> float:
    slowest = min(cluster.link_bytes_per_second[i] for i in group)
    hops = 2 * (len(group) - 1) * cluster.hop_seconds
    return hops + ring_bytes(cluster.model_bytes, len(group)) / slowest


def ring_bytes(model_bytes: float, members: int) -> float:
    """Return what each member of a ring all-reduce sends."""
    return 2 * (members - 1) / members * model_bytes
