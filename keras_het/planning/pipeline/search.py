r"""Branch and bound over the two bounds of the dynamic program: optimal up to a tolerance.

The estimate of a step is the sum of a maximum over stages and transfers (steady), a sum (latency)
and a maximum over stages (all-reduce). With f(beta, rho) the least latency below both bounds, every
plan with beta_0 < steady <= beta_1 and rho_0 <= all-reduce <= rho_1 takes at least

.. math:: \beta_0 + \rho_0 + f(\beta_1, \rho_1).

The plan that attains f has steady b and all-reduce r. No other plan of the box with steady >= b and
all-reduce >= r is faster; what is left are the boxes steady < b, and steady >= b, all-reduce < r.
The box of the least bound is the next one, and the search ends when no box can hold a plan that is
faster by more than the tolerance.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence

import numpy as np

from keras_het.planning.pipeline.least_latency import Chain, LeastLatency


@dataclasses.dataclass(frozen=True)
class Found:
    """Result of a search."""

    chains: tuple[tuple[float, int, Chain], ...]
    bound: float
    evaluations: int


@dataclasses.dataclass(frozen=True)
class _Box:
    """Plans of a program with low < steady <= high, also for all-reduce, and at least `latency`."""

    program: int
    steady: tuple[float, float]
    all_reduce: tuple[float, float]
    latency: float = 0.0

    @property
    def bound(self) -> float:
        """No plan has a lower estimate."""
        return self.latency + self.steady[0] + self.all_reduce[0]

    def below(self, seconds: float) -> _Box:
        """Return the part in which plans may have a lower estimate."""
        left = seconds - self.bound
        steady, reduce = self.steady, self.all_reduce
        return dataclasses.replace(
            self,
            steady=(steady[0], min(steady[1], steady[0] + left)),
            all_reduce=(reduce[0], min(reduce[1], reduce[0] + left)),
        )

    def rest(self, steady: float, all_reduce: float) -> list[_Box]:
        """Return the parts that may hold better plans than one of least latency."""
        result = []
        if steady > self.steady[0]:
            for part in _halves(self.steady[0], float(np.nextafter(steady, -np.inf))):
                result.append(dataclasses.replace(self, steady=part))
        if all_reduce > self.all_reduce[0]:
            above = (max(self.steady[0], steady), self.steady[1])
            for part in _halves(self.all_reduce[0], float(np.nextafter(all_reduce, -np.inf))):
                result.append(dataclasses.replace(self, steady=above, all_reduce=part))
        return result


def _halves(low: float, high: float) -> list[tuple[float, float]]:
    middle = (low + high) / 2
    return [(low, middle), (middle, high)]


def search(
    programs: Sequence[LeastLatency],
    tolerance: float,
    most_evaluations: int | None = None,
    known: float = np.inf,
) -> Found:
    """Return the chains of least estimated time."""
    found: dict[Chain, tuple[float, int]] = {}
    best = known
    whole = (0.0, np.inf)
    queue = [(0.0, n, _Box(n, whole, whole)) for n in range(len(programs))]
    number, evaluations, bound = len(queue), 0, 0.0
    while queue:
        bound, _, box = heapq.heappop(queue)
        goal = best * (1 - tolerance)
        if bound >= goal or evaluations == most_evaluations:
            break
        box = box.below(goal)
        program = programs[box.program]
        latency, chain = program.solve(box.steady[1], box.all_reduce[1])
        evaluations += 1
        if not chain:
            continue
        box = dataclasses.replace(box, latency=latency)
        were_exact = program.exact(chain)
        cost = program.cost(chain)
        if np.isfinite(cost.seconds):
            found[chain] = cost.seconds, box.program
            best = min(best, cost.seconds)
        for part in box.rest(cost.steady, cost.all_reduce) if were_exact else [box]:
            if part.bound < best * (1 - tolerance):
                heapq.heappush(queue, (max(bound, part.bound), number, part))
                number += 1
    else:
        bound = best
    chains = sorted(((*value, chain) for chain, value in found.items()), key=lambda f: f[0])
    return Found(tuple(chains), min(bound, best), evaluations)
