"""Simulated clusters: what a policy's plans would do to real steps."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable

import numpy as np

from keras_het.planning.balance import BalancePlan, BalancePolicy
from keras_het.planning.balance.min_max import min_max_shares

BATCH = 256


@dataclasses.dataclass(frozen=True)
class Plant:
    """Devices whose time is a line, times a factor that may change from step to step.

    With a `curve`, lines count samples bent by this nondecreasing function.
    """

    name: str
    fixed: tuple[float, ...]
    slope: tuple[float, ...]
    batch: int = BATCH
    upper: tuple[int, ...] | None = None
    factor: Callable[[int], tuple[float, ...]] | None = None
    noise: float = 0.0
    spike_probability: float = 0.0
    # a last batch of a third of the samples after so many steps
    steps_per_epoch: int | None = None
    curve: Callable[[np.ndarray], np.ndarray] | None = None

    @property
    def num_replicas(self):
        return len(self.fixed)

    def times(self, step, shares):
        """True compute times, 0 without samples."""
        return np.where(np.asarray(shares) > 0, self.line(shares) * self.factors(step), 0.0)

    def line(self, shares):
        samples = self.curve(np.asarray(shares)) if self.curve else np.asarray(shares)
        return np.array(self.fixed) + np.array(self.slope) * samples

    def factors(self, step):
        return np.array(self.factor(step)) if self.factor else np.ones(self.num_replicas)

    def measured(self, step, shares, random):
        """Measured times: noise, outliers, and one row of zeros without samples."""
        times = self.line(np.maximum(shares, 1)) * self.factors(step)
        times *= np.maximum(1 + self.noise * random.standard_normal(len(times)), 0.2)
        return np.where(random.random(len(times)) < self.spike_probability, 5 * times, times)

    def limit(self, step):
        """Step time of the optimum for the true times."""
        return best_seconds(self, tuple(self.factors(step).tolist()))


@functools.cache
def best_seconds(plant, factors):
    none = np.zeros(plant.num_replicas, np.int64)
    shares = min_max_shares(lambda b: plant.line(b) * factors, plant.batch, none, upper=plant.upper)
    return np.where(shares > 0, plant.line(shares) * factors, 0.0).max()


def by_speeds(name, speeds, fixed=0.0, **options):
    """Devices of which the fastest takes a millisecond for a sample."""
    slope = tuple(1e-3 * max(speeds) / speed for speed in speeds)
    return Plant(name, (fixed,) * len(speeds), slope, **options)


def slow_down(replica, count, start, end, by=3.0):
    """A factor: one of `count` replicas is slower from step `start` up to step `end`."""

    def factor(step):
        return tuple(by if start <= step < end and r == replica else 1.0 for r in range(count))

    return factor


STATIC = [
    by_speeds("1:1", (1, 1)),
    by_speeds("2:1", (2, 1)),
    by_speeds("4:2:1", (4, 2, 1)),
    by_speeds("4:2:1:1", (4, 2, 1, 1)),
    by_speeds("8:1", (8, 1)),
    by_speeds("4:2:1 fixed 20 ms", (4, 2, 1), fixed=0.02),
    Plant("fixed 5 20 60 ms", (0.005, 0.02, 0.06), (5e-4, 5e-4, 5e-4)),
    by_speeds("4:2:1 memory bound", (4, 2, 1), upper=(100, BATCH, BATCH)),
    by_speeds("eight mixed", (8, 8, 4, 4, 2, 2, 1, 1), batch=1024),
]


CURVED = [
    by_speeds("caches overflow", (4, 2, 1), curve=lambda b: b + 2 * np.maximum(b - 100, 0)),
    by_speeds("flat at first", (4, 2, 1), curve=lambda b: np.maximum(b, 48)),
    by_speeds("quadratic", (4, 2, 1), curve=lambda b: b + b**2 / 100),
]


@dataclasses.dataclass
class Run:
    """What happened: shares and true times of every step, and the plans."""

    plant: Plant
    shares: list[tuple[int, ...]]
    seconds: np.ndarray
    limits: np.ndarray
    plans: list[BalancePlan]

    def steps_to_balance(self, start=0, end=None, within=1.05):
        """Steps from `start` until the step takes at most `within` of the limit, up to `end`."""
        slow = self.seconds[start:end] > within * self.limits[start:end]
        return int(np.flatnonzero(slow)[-1]) + 1 if slow.any() else 0

    def ratio_to_limit(self, start=0, end=None):
        return float(self.limits[start:end].sum() / self.seconds[start:end].sum())

    def changes(self, start=0, end=10**9):
        """Plans after the first one that changed the shares, by the step of the decision."""
        return [plan for plan in self.plans[1:] if start <= plan.step < end]


def simulate(
    policy: BalancePolicy,
    plant: Plant,
    steps: int,
    lookahead: int = 2,
    seed: int = 0,
    hide: float = 0.0,
) -> Run:
    """Trains: a plan after step s is in effect from step s + lookahead + 1 on.

    `hide` is the probability that a measurement is not known.
    """
    random = np.random.default_rng(seed)
    plans = [policy.propose(-1)]
    ahead = collections.deque([policy.shares] * lookahead)
    used, seconds, limits = [], [], []
    for step in range(steps):
        ahead.append(policy.shares)
        shares = np.array(ahead.popleft())
        partial = plant.steps_per_epoch and (step + 1) % plant.steps_per_epoch == 0
        if partial:
            shares = shares // 3
        measured = plant.measured(step, shares, random)
        measured[random.random(len(measured)) < hide] = np.nan
        policy.observe(step, shares, measured)
        if plan := policy.propose(step):
            plans.append(plan)
        if not partial:
            used.append(tuple(shares.tolist()))
            seconds.append(plant.times(step, shares).max())
            limits.append(plant.limit(step))
    return Run(plant, used, np.array(seconds), np.array(limits), plans)
