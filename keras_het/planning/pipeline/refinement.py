"""Which cuts and which orders of the devices the search looks at, for models with many units.

A model with up to 31 places to cut is searched as it is. A larger one is first cut only where few
bytes cross, at about equal distances in time, for all orders of the devices; then only near the
cuts of the best chains, for their orders, closer and closer.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from keras_het.planning.pipeline.least_latency import Chain, Group, GroupCosts, LeastLatency
from keras_het.planning.pipeline.problem import Devices, ModelProfile, Problem

Order = tuple[int, ...]
Found = list[tuple[float, Order, Chain]]
"""Estimated seconds, order of the devices, and chain; the best first."""


@dataclasses.dataclass(frozen=True)
class _Box:
    """Plans of a program with low < steady <= high, also for all-reduce, and at least `latency`."""

    program: LeastLatency
    steady: tuple[float, float]
    all_reduce: tuple[float, float]
    latency: float = 0.0

    @property
    def bound(self) -> float:
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
    r"""Return the chains of least estimated time, by branch and bound: optimal up to a tolerance.

    The estimate of a step is the sum of a maximum over stages and transfers (steady), a sum
    (latency) and a maximum over stages (all-reduce). With f(beta, rho) the least latency below both
    bounds, every plan with beta_0 < steady <= beta_1 and rho_0 <= all-reduce <= rho_1 takes at
    least

    .. math:: \beta_0 + \rho_0 + f(\beta_1, \rho_1).

    The plan that attains f has steady b and all-reduce r. No other plan of the box with steady >= b
    and all-reduce >= r is faster; what is left are the boxes steady < b, and steady >= b,
    all-reduce < r. The box of the least bound is the next one, and the search ends when no box can
    hold a plan that is faster by more than the tolerance.
    """
    found: dict[Chain, tuple[float, Order]] = {}
    best = known
    whole = (0.0, np.inf)
    queue = [(0.0, n, _Box(program, whole, whole)) for n, program in enumerate(programs)]
    number, evaluations = len(queue), 0
    while queue:
        bound, _, box = heapq.heappop(queue)
        goal = best * (1 - tolerance)
        if bound >= goal or evaluations == most_evaluations:
            break
        box = box.below(goal)
        program = box.program
        latency, chain = program.solve(box.steady[1], box.all_reduce[1])
        evaluations += 1
        if not chain.groups:
            continue
        box = dataclasses.replace(box, latency=latency)
        were_exact = program.exact(chain)
        steady, spent, all_reduce = program.cost(chain)
        seconds = steady + spent + all_reduce
        if np.isfinite(seconds):
            found[chain] = seconds, program.order
            best = min(best, seconds)
        for part in box.rest(steady, all_reduce) if were_exact else [box]:
            if part.bound < best * (1 - tolerance):
                heapq.heappush(queue, (max(bound, part.bound), number, part))
                number += 1
    return sorted(((*value, chain) for chain, value in found.items()), key=lambda f: f[0])


_MOST_CUTS = 33
_COARSE_BLOCKS = 24
_COARSE_TOLERANCE = 0.01
# How many of the best chains are looked at more closely.
_REFINED = 6
_REFINED_ORDERS = 2
# Numbers that all runs of the dynamic program may read; the first count covers the fixed cost of a
# call for each group.
_CALL = 3_000
_WORK = 2e9
_EVALUATIONS_PER_ORDER = 16
# Groups of devices whose costs are computed, times units.
_MOST_UNITS_OF_GROUPS = 8e4

_MOST_HOSTS = 6


def device_orders(profile: ModelProfile, devices: Devices) -> list[Order]:
    """Return orders of all devices, those with the fastest links between neighbours first.

    The devices of a host are neighbours, the fastest first. Up to 6 hosts come in every order, more
    hosts each by the nearest neighbour from every start; equal devices are not told apart.
    """
    seconds = (profile.forward_seconds + profile.backward_seconds).sum(axis=0)
    hosts = sorted(set(devices.hosts))
    inside = {
        host: sorted(
            (d for d in range(devices.num_devices) if devices.hosts[d] == host),
            key=lambda d: (seconds[d], -devices.memory_bytes[d], d),
        )
        for host in hosts
    }
    size = float(profile.cut_bytes[1:-1].mean()) if profile.num_units > 1 else 0.0

    def link(before: int, after: int) -> float:
        sender, receiver = inside[before][-1], inside[after][0]
        there = devices.transfer_seconds(sender, receiver, size)
        return max(there, devices.transfer_seconds(receiver, sender, size))

    def length(order: Sequence[int]) -> float:
        return sum(itertools.starmap(link, itertools.pairwise(order)))

    candidates: Iterable[tuple[int, ...]]
    if len(hosts) <= _MOST_HOSTS:
        candidates = itertools.permutations(hosts)
    else:
        chains = [_nearest(start, hosts, link) for start in hosts]
        candidates = [*chains, *(chain[::-1] for chain in chains)]
    found: dict[bytes, Order] = {}
    for order in sorted(candidates, key=lambda order: (length(order), order)):
        chosen = tuple(device for host in order for device in inside[host])
        found.setdefault(_looks(profile, devices, chosen), chosen)
    return list(found.values())


def _nearest(
    start: int, hosts: Sequence[int], link: Callable[[int, int], float]
) -> tuple[int, ...]:
    chain, left = [start], set(hosts) - {start}
    while left:
        chain.append(min(left, key=lambda host: (link(chain[-1], host), host)))
        left.remove(chain[-1])
    return tuple(chain)


def _looks(profile: ModelProfile, devices: Devices, order: tuple[int, ...]) -> bytes:
    """Return all that a plan can see of an order."""
    chosen = list(order)
    numbers = {host: n for n, host in enumerate(dict.fromkeys(devices.hosts[d] for d in order))}
    parts = (
        profile.forward_seconds[:, chosen],
        profile.backward_seconds[:, chosen],
        devices.memory_bytes[chosen],
        devices.bytes_per_second[np.ix_(chosen, chosen)],
        devices.latency_seconds[np.ix_(chosen, chosen)],
        np.array([numbers[devices.hosts[d]] for d in order]),
    )
    return b"".join(np.ascontiguousarray(part).tobytes() for part in parts)


def find_chains(problem: Problem, tolerance: float) -> list[Chain]:
    orders, coarse = device_orders(problem.profile, problem.devices), coarse_cuts(problem)
    if coarse == problem.cuts:
        return [chain for _, _, chain in _search(problem, orders, tolerance)]
    level = dataclasses.replace(problem, cuts=coarse)
    ranked = _search(level, orders, max(tolerance, _COARSE_TOLERANCE))
    if not ranked:
        # Memory may need cuts in between.
        found = _search(problem, orders[:_REFINED_ORDERS], tolerance)
        return [chain for _, _, chain in found]
    reach = len(problem.cuts) // _COARSE_BLOCKS
    while True:
        near = _near(problem, [chain for _, _, chain in ranked[:_REFINED]], reach)
        level = dataclasses.replace(problem, cuts=near)
        orders = list(dict.fromkeys(order for _, order, _ in ranked))[:_REFINED_ORDERS]
        ranked += _search(level, orders, tolerance, ranked[0][0])
        ranked.sort(key=lambda r: r[0])
        if reach == 1:
            return list(dict.fromkeys(chain for _, _, chain in ranked))
        reach = (reach + 1) // 2


def _search(
    problem: Problem, orders: list[Order], tolerance: float, known: float = np.inf
) -> Found:
    """Search as many orders as there is time for."""
    most = int(np.clip(_WORK / _work(problem), 60, 20_000))
    costs: dict[Group, GroupCosts] = {}
    programs: list[LeastLatency] = []
    for order in orders[: max(1, most // _EVALUATIONS_PER_ORDER)]:
        if len(costs) * problem.profile.num_units > _MOST_UNITS_OF_GROUPS:
            break
        programs.append(LeastLatency(problem, order, costs))
    return search(programs, tolerance, most, known)


def _work(problem: Problem) -> float:
    """Return about how many numbers the dynamic program reads in a run."""
    number, most = problem.devices.num_devices, problem.micro_batches
    sizes = range(1, min(number, most) + 1)
    groups = tables = sum(number - size + 1 for size in sizes)
    if np.isfinite(problem.devices.memory_bytes).any() and problem.schedule == "1f1b":
        tables = sum((number - size + 1) * (number - size + 2) // 2 for size in sizes)
    cuts = len(problem.cuts)
    return float(tables * (cuts**2 + _CALL) + groups * tables * cuts / 2)


def coarse_cuts(problem: Problem) -> tuple[int, ...]:
    """Return few cuts at about equal distances in time, each where few bytes cross, or all cuts."""
    if problem.all_cuts or len(problem.cuts) <= _MOST_CUTS:
        return problem.cuts
    profile, cuts = problem.profile, np.asarray(problem.cuts)
    seconds = (profile.forward_seconds + profile.backward_seconds).mean(axis=1)
    done = np.append(0.0, np.cumsum(seconds))[cuts]
    blocks = np.round(done / max(done[-1], 1e-30) * _COARSE_BLOCKS)
    crossing = (profile.cut_bytes + profile.gradient_bytes)[cuts]
    chosen = {0, profile.num_units}
    for block in range(1, _COARSE_BLOCKS):
        inside = np.flatnonzero(blocks == block)
        if len(inside):
            chosen.add(int(cuts[inside[crossing[inside].argmin()]]))
    return tuple(sorted(chosen))


def _near(problem: Problem, chains: Iterable[Chain], reach: int) -> tuple[int, ...]:
    """Return cuts up to `reach` places from those of the chains, of the best chains first."""
    last = len(problem.cuts) - 1
    chosen = {0, last}
    for chain in chains:
        for step in (0, reach, -reach):
            for row in map(problem.cuts.index, chain.cuts[1:-1]):
                if len(chosen) < _MOST_CUTS:
                    chosen.add(min(max(row + step, 0), last))
    return tuple(problem.cuts[row] for row in sorted(chosen))
