"""All plans of small problems, and plain plans of any, without the planner's search."""

from __future__ import annotations

import itertools

import numpy as np

from keras_het.planning.pipeline.partition import Candidates
from keras_het.planning.pipeline.problem import Chain
from keras_het.planning.pipeline.search import Search


def every_chain(problem):
    """All stages of neighbouring units on any devices; some may be unused."""
    number, last = problem.devices.num_devices, len(problem.cuts) - 1
    for stages in range(1, min(number, last) + 1):
        for inner in itertools.combinations(problem.cuts[1:-1], stages - 1):
            for places in itertools.product(range(stages + 1), repeat=number):
                groups = [tuple(d for d in range(number) if places[d] == s) for s in range(stages)]
                if all(groups):
                    yield Chain((0, *inner, problem.cuts[-1]), tuple(groups))


def plain_chains(problem):
    """Stages in proportion to speed, for plain orders of the devices, and those a cut away."""
    profile, devices, cuts = problem.profile, problem.devices, problem.cuts
    seconds = profile.forward_seconds + profile.backward_seconds
    number, speeds = devices.num_devices, 1 / seconds.sum(axis=0)
    done = np.append(0, np.cumsum(seconds.mean(axis=1)))[list(cuts)] / seconds.mean(axis=1).sum()
    by_speed, by_memory = np.argsort(-speeds), np.argsort(-devices.memory_bytes, kind="stable")
    orders = {tuple(order) for order in (range(number), by_speed, by_speed[::-1], by_memory)}
    for order, stages in itertools.product(orders, range(1, min(number, len(cuts) - 1) + 1)):
        groups = tuple(tuple(sorted(map(int, g))) for g in np.array_split(order, stages))
        parts = np.cumsum([sum(speeds[d] for d in group) for group in groups])
        rows = [0]
        for n, part in enumerate(parts[:-1]):
            row = int(np.abs(done - part / parts[-1]).argmin())
            rows.append(min(max(row, rows[-1] + 1), len(cuts) - stages + n))
        rows.append(len(cuts) - 1)
        for s, step in itertools.product(range(1, stages), (0, -1, 1)):
            moved = [*rows[:s], rows[s] + step, *rows[s + 1 :]]
            if all(a < b for a, b in itertools.pairwise(moved)):
                yield Chain(tuple(cuts[row] for row in moved), groups)
        yield Chain(tuple(cuts[row] for row in rows), groups)


def fastest(problem, chains):
    """The least simulated step of some chains; infinite if none fits."""
    candidates = Candidates(Search(problem))
    plans = (candidates.add(chain) for chain in dict.fromkeys(chains))
    return min((plan.step_seconds for plan in plans if plan is not None), default=np.inf)
