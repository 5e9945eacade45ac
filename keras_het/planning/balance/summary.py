"""What balancing has done to a training, in numbers and in a few lines."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from keras_het.planning.balance.plan_trial import REVERTED
from keras_het.planning.balance.policy import BalancePlan
from keras_het.planning.shares import MAX_TOTAL, FloatArray, IntArray, proportional_shares
from keras_het.planning.time_model_fit import TimeModelFit

# Latest steps whose median is the present time.
_RECENT = 64
_WARM_UP = 2.0
_MOST_REPLICAS = 16
_MOST_REVERTED = 3
_SAME = 0.005


@dataclasses.dataclass(frozen=True)
class BalanceSummary:
    """What a balancer has done; `str()` says it in a few lines."""

    policy: str
    num_plans: int
    num_steps: int
    first: tuple[int, ...] = ()
    now: tuple[int, ...] = ()
    step_seconds: float = np.nan
    even_seconds: float = np.nan
    seconds_per_sample: FloatArray = dataclasses.field(default_factory=lambda: np.zeros(0))
    never_measured: tuple[int, ...] = ()
    reverted: tuple[BalancePlan, ...] = ()

    @property
    def gain(self) -> float:
        """How many times as long a step would compute with even shares; NaN if unknown."""
        return self.even_seconds / self.step_seconds if self.step_seconds > 0 else np.nan

    def __str__(self) -> str:
        who = f"BatchBalancer ({self.policy})"
        if not self.num_steps:
            return (
                f"{who} has measured nothing yet: it measures while model.fit runs with it, from "
                "the second step on."
            )
        lines = [
            f"{who}: {self._times()}",
            f"{_count(self.num_plans, 'plan')}; {self.num_steps} measured steps.",
            *self._replicas(),
        ]
        if self.never_measured:
            which = " ".join(map(str, self.never_measured[:_MOST_REPLICAS]))
            lines.append(f"Never measured, and counted as free: replica {which}.")
        if self.reverted:
            lines.append(
                f"Reverted, because steps did not become as short as predicted: "
                f"{_count(len(self.reverted), 'plan')}."
            )
            lines += [
                f"  step {plan.step}: {plan.reason.removeprefix(REVERTED)}"
                for plan in self.reverted[-_MOST_REVERTED:]
            ]
        return "\n".join(lines)

    def _times(self) -> str:
        if not np.isfinite(self.gain):
            return "no compute times are known of the latest steps."
        now, even = self.step_seconds * 1e3, self.even_seconds * 1e3
        times = f"even shares would take {even:.3g} ms of compute time a step, now {now:.3g} ms"
        times += " (medians)"
        if abs(self.gain - 1) <= _SAME:
            return f"{times}: no difference."
        if self.gain < 1:
            return f"{times}: the present shares are {1 / self.gain:.2f} times as slow."
        return f"{times}: {self.gain:.2f} times as fast."

    def _replicas(self) -> list[str]:
        n = len(self.now)
        shown = list(range(n))
        if n > _MOST_REPLICAS:
            slowest = np.argsort(-np.nan_to_num(self.seconds_per_sample, nan=-1.0), kind="stable")
            shown = sorted(slowest[:_MOST_REPLICAS].tolist())
        lines = ["replica  first share  share now  ms per sample"]
        for replica in shown:
            seconds = float(self.seconds_per_sample[replica])
            per_sample = f"{seconds * 1e3:.3g}" if np.isfinite(seconds) else "unknown"
            first, now = self.first[replica], self.now[replica]
            lines.append(f"{replica:7}  {first:11}  {now:9}  {per_sample:>13}")
        if n > len(shown):
            lines.append(f"and {n - len(shown)} others, which are faster")
        return lines


def summarize(
    policy: str, plans: Sequence[BalancePlan], rows: Iterable[Mapping[str, Any]]
) -> BalanceSummary:
    """Compare the latest steps with what they would be with even shares."""
    kept = list(rows)
    reverted = tuple(plan for plan in plans if plan.reason.startswith(REVERTED))
    if not kept:
        return BalanceSummary(policy, len(plans), 0, reverted=reverted)
    if len({len(row["shares"]) for row in kept} | {len(row["seconds"]) for row in kept}) > 1:
        raise ValueError(
            "Each step needs one share and one time for each replica. Received: steps with "
            f"{sorted({len(row['shares']) for row in kept})} shares. Pass the measurements of one "
            "balancer."
        )
    shares = np.array([row["shares"] for row in kept], np.int64)
    seconds = np.array([row["seconds"] for row in kept], np.float64)
    seconds[(shares <= 0) | ~(seconds > 0)] = np.nan
    models = plans[-1].models if plans else ()
    sizes = [getattr(times, "micro_batch_size", MAX_TOTAL) for times in models]
    fit = TimeModelFit(shares.shape[1], micro_batch_sizes=sizes or None)
    for used, times in zip(shares[_warm_up(seconds) :], seconds[_warm_up(seconds) :], strict=True):
        fit.observe(used, times)
    now = _latest_whole(shares, plans)
    recent = np.flatnonzero((shares == now).all(axis=1))[-_RECENT:]
    step, even = _step_and_even(fit, now, seconds[recent])
    return BalanceSummary(
        policy,
        len(plans),
        int(kept[-1]["step"]) + 1,
        tuple(plans[0].shares) if plans else tuple(shares[0].tolist()),
        tuple(now.tolist()),
        step,
        even,
        _seconds_per_sample(shares, seconds, recent),
        tuple(np.flatnonzero(~fit.known).tolist()),
        reverted,
    )


def _warm_up(seconds: FloatArray) -> int:
    """Return 1 if the first step loaded kernels and memory: it took far longer everywhere."""
    if len(seconds) < 2:
        return 0
    known = ~np.isnan(seconds[0]) & ~np.isnan(seconds[1])
    is_longer = seconds[0, known] > _WARM_UP * seconds[1, known]
    return int(is_longer.any() and is_longer.all())


def _latest_whole(shares: IntArray, plans: Sequence[BalancePlan]) -> IntArray:
    """Return the shares of the latest step that is no smaller last batch of an epoch."""
    total = sum(plans[-1].shares) if plans else int(shares[-1].sum())
    whole = np.flatnonzero(shares.sum(axis=1) == total)
    return shares[whole[-1] if len(whole) else -1]


def _step_and_even(fit: TimeModelFit, now: IntArray, seconds: FloatArray) -> tuple[float, float]:
    """Return the median time of steps with the present shares, and of the same with even ones."""
    even_shares = proportional_shares(int(now.sum()), np.ones(len(now)))
    present = fit.seconds(now)
    even = np.where(even_shares > 0, fit.seconds(even_shares), 0.0)
    deviation = np.ones_like(seconds)
    np.divide(seconds, present, out=deviation, where=(present > 0) & ~np.isnan(seconds))
    steps = np.nan_to_num(seconds).max(axis=1, initial=0.0)
    return _median(steps[steps > 0]), _median((even * deviation).max(axis=1)[steps > 0])


def _seconds_per_sample(shares: IntArray, seconds: FloatArray, recent: IntArray) -> FloatArray:
    ratio = np.full(seconds.shape, np.nan)
    np.divide(seconds, shares, out=ratio, where=shares > 0)
    result = np.full(shares.shape[1], np.nan)
    for replica in range(shares.shape[1]):
        known = ratio[recent, replica][~np.isnan(ratio[recent, replica])]
        if not len(known):
            known = ratio[~np.isnan(ratio[:, replica]), replica][-_RECENT:]
        result[replica] = _median(known)
    return result


def _median(values: FloatArray) -> float:
    return float(np.median(values)) if len(values) else np.nan


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
