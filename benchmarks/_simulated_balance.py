"""The balance policies on simulated clusters: no process, no time, only noise and outliers.

A plan after step s is in effect from step s + 3 on, as in `fit`. Each time of a device is
multiplied by a factor of its own, and rarely by one of 2 to 10. The limit knows the true speeds.
"""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
from _peer_policies import PEERS

from keras_het.planning import LinearTimeModel, min_max_shares
from keras_het.planning.balance import BoaPolicy

LOOKAHEAD = 2
SECONDS_PER_SAMPLE = 2e-3  # of a device of speed 1
ONCE = ((50, 100),)
FIVE_TIMES = tuple((40 + 60 * i, 70 + 60 * i) for i in range(5))
POLICIES = {"proportional": PEERS["proportional"], "lbb": PEERS["lbb"], "min_max": BoaPolicy}


@dataclasses.dataclass(frozen=True)
class Simulated:
    """A cluster whose first device is three times slower in some ranges of steps.

    Args:
        speeds: relative speed of each device.
        noise: standard deviation of the logarithm of each time.
        slow: ranges of steps.
        steps: number of steps.
        fixed_seconds: fixed time of every step of a device.
        outliers: probability that a time is an outlier.
    """

    speeds: tuple[float, ...] = (4, 2, 1)
    noise: float = 0.01
    slow: tuple[tuple[int, int], ...] = ONCE
    steps: int = 150
    fixed_seconds: float = 0.0
    outliers: float = 0.0

    def models(self, step: int) -> list[LinearTimeModel]:
        """Return the true time models in a step."""
        factors = [1.0] * len(self.speeds)
        factors[0] = 3.0 if any(first <= step < end for first, end in self.slow) else 1.0
        return [
            LinearTimeModel(factor * self.fixed_seconds, factor * SECONDS_PER_SAMPLE / speed)
            for factor, speed in zip(factors, self.speeds, strict=True)
        ]


CASES = {
    "1 %, one slows down": Simulated(),
    "1 %, comes and goes": Simulated(slow=FIVE_TIMES, steps=340),
    "1 %, one slows down, 20 ms fixed": Simulated(fixed_seconds=0.02),
    "5 %, comes and goes": Simulated(noise=0.05, slow=FIVE_TIMES, steps=340),
    "20 %, nothing changes": Simulated(noise=0.2, slow=(), steps=300),
    "20 %, comes and goes": Simulated(noise=0.2, slow=FIVE_TIMES, steps=340),
    "20 %, six devices, one slows down": Simulated((4, 4, 2, 2, 1, 1), noise=0.2),
    "3 %, outliers in 2 %, one slows down": Simulated(noise=0.03, outliers=0.02),
    "3 %, outliers in 10 %, one slows down": Simulated(noise=0.03, outliers=0.1),
    "3 %, outliers in 10 %, nothing changes": Simulated(
        noise=0.03, slow=(), steps=300, outliers=0.1
    ),
}


def best_shares(
    models: Sequence[LinearTimeModel], total: int, upper: Sequence[int] | None = None
) -> np.ndarray:
    """Return the solver's shares for true times."""

    def times(shares: np.ndarray) -> np.ndarray:
        return np.array([m.seconds(int(b)) for m, b in zip(models, shares, strict=True)])

    return min_max_shares(times, total, [0] * len(models), upper)


def ratio_to_limit(case: Simulated, policy: Any, seed: int) -> float:
    """Return the time of all steps but the first under the limit, over the policy's."""
    random, number = np.random.default_rng(seed), len(case.speeds)
    batch = int(20 * sum(case.speeds))
    shares = policy.propose(-1).shares
    coming: collections.deque[tuple[int, tuple[int, ...]]] = collections.deque()
    spent = least = 0.0
    for step in range(case.steps):
        while coming and coming[0][0] <= step:
            shares = coming.popleft()[1]
        models = case.models(step)
        best = best_shares(models, batch)
        factors = np.exp(case.noise * random.normal(size=number))
        is_outlier = random.random(number) < case.outliers
        factors = np.where(is_outlier, factors * random.uniform(2, 10, number), factors)
        own = [m.seconds(s) if s else np.nan for m, s in zip(models, shares, strict=True)]
        ideal = [m.seconds(int(s)) if s else 0.0 for m, s in zip(models, best, strict=True)]
        if step:
            spent += float(np.nanmax(own * factors))
            least += float((ideal * factors).max())
        policy.observe(step, shares, own * factors)
        if (plan := policy.propose(step)) is not None:
            coming.append((step + 1 + LOOKAHEAD, tuple(plan.shares)))
    return least / spent


def simulated_rows(quick: bool) -> list[dict[str, Any]]:
    """Return one row for every policy in every case."""
    seeds = 1 if quick else 8
    rows = []
    for name, case in list(CASES.items())[: 1 if quick else None]:
        batch = int(20 * sum(case.speeds))
        for policy, make in POLICIES.items():
            policies = [make(len(case.speeds), batch) for _ in range(seeds)]
            found = [ratio_to_limit(case, each, seed) for seed, each in enumerate(policies)]
            rows.append(
                {
                    "case": f"simulated, {name}",
                    "policy": policy,
                    "ratio_to_limit": round(statistics.mean(found), 3),
                    "lowest_ratio": round(min(found), 3),
                    "highest_ratio": round(max(found), 3),
                    "num_runs": seeds,
                }
            )
    return rows
