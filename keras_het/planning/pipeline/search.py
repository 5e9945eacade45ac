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
    """Result of a search.

    Args:
        chains: chains and their estimates in seconds, the fastest first.
        bound: no plan has a lower estimate, in seconds.
        evaluations: how often the dynamic program ran.
    """

    chains: tuple[tuple[float, Chain], ...]
    bound: float
    evaluations: int


@dataclasses.dataclass(frozen=True)
class _Box:
    program: int
    steady: tuple[float, float]
    all_reduce: tuple[float, float]


def search(
    programs: Sequence[LeastLatency], tolerance: float, most_evaluations: int | None = None
) -> Found:
    """Return the chains of least estimated time.

    Args:
        programs: the dynamic program of each order of the devices.
        tolerance: how much slower the result may be than the optimum, as a fraction.
        most_evaluations: end after so many runs of the dynamic program, with what is known.
    """
    found: dict[Chain, float] = {}
    best = np.inf
    whole = (0.0, np.inf)
    queue = [(0.0, n, _Box(n, whole, whole)) for n in range(len(programs))]
    number, evaluations, bound = len(queue), 0, 0.0
    while queue:
        bound, _, box = heapq.heappop(queue)
        if bound >= best * (1 - tolerance) or evaluations == most_evaluations:
            break
        program = programs[box.program]
        latency, chain = program.solve(box.steady[1], box.all_reduce[1])
        evaluations += 1
        if not chain:
            continue
        known = program.exact(chain)
        cost = program.cost(chain)
        if np.isfinite(cost.seconds):
            found[chain] = cost.seconds
            best = min(best, cost.seconds)
        for part in _rest(box, cost.steady, cost.all_reduce) if known else [box]:
            least = max(bound, latency + part.steady[0] + part.all_reduce[0])
            if least < best * (1 - tolerance):
                heapq.heappush(queue, (least, number, part))
                number += 1
    else:
        bound = best
    chains = sorted(((seconds, chain) for chain, seconds in found.items()), key=lambda f: f[0])
    return Found(tuple(chains), min(bound, best), evaluations)


def _rest(box: _Box, steady: float, all_reduce: float) -> list[_Box]:
    """Return the parts of a box that may hold better plans than one with these maxima."""
    low, _ = box.steady
    under = float(np.nextafter(steady, -np.inf))
    boxes = []
    if low <= under:
        middle = (low + under) / 2
        boxes.append(_Box(box.program, (low, middle), box.all_reduce))
        boxes.append(_Box(box.program, (middle, under), box.all_reduce))
    less = float(np.nextafter(all_reduce, -np.inf))
    if box.all_reduce[0] <= less:
        middle = (box.all_reduce[0] + less) / 2
        above = (max(low, steady), box.steady[1])
        boxes.append(_Box(box.program, above, (box.all_reduce[0], middle)))
        boxes.append(_Box(box.program, above, (middle, less)))
    return boxes
