"""Chains of stages that are worth a simulation: plain ones, changed while their bound falls."""

from __future__ import annotations

import bisect
import collections
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from keras_het.planning.pipeline.least_time import LeastTime, Value
from keras_het.planning.pipeline.problem import TINY, Chain, Group, Problem

# How many chains are known before the last start is improved, and how many each one may add.
_MOST = 2600
_MOST_EACH = 900


class Search:
    """Chains of a problem and their values, from `LeastTime`."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.bounds = problem, LeastTime(problem)
        self.known: dict[Chain, Value] = {}
        profile, number = problem.profile, problem.devices.num_devices
        seconds = profile.forward_seconds + profile.backward_seconds
        self._all = range(number)
        self._speeds = (1 / np.maximum(seconds.sum(axis=0), TINY)).tolist()
        self._memory = problem.devices.memory_bytes.tolist()
        crossing = profile.cut_bytes + profile.gradient_bytes
        self._crossing = crossing[list(problem.cuts)].tolist()
        # How much of the model comes before each cut.
        self._work = self._before(seconds.mean(axis=1))
        self._bytes = self._before(profile.state_bytes + profile.activation_bytes)

    def run(self) -> None:
        """Improve starts: the best one of each number of stages, then the second best ones ..."""
        ranks: collections.Counter[int] = collections.Counter()
        ordered: list[tuple[int, int, Chain]] = []
        for chain in sorted(set(self._starts()), key=lambda chain: (self.value(chain), chain)):
            number = len(chain.groups)
            ordered.append((ranks[number], len(ordered), chain))
            ranks[number] += 1
        for _, _, chain in sorted(ordered):
            if len(self.known) > _MOST:
                break
            self.improved(chain)

    def value(self, chain: Chain, limit: float = np.inf) -> Value:
        if chain not in self.known:
            self.known[chain] = self.bounds.of(chain, limit)
        return self.known[chain]

    def improved(self, chain: Chain) -> Chain:
        """Return what a chain becomes while neighbours have a lower bound."""
        value, moves = self.value(chain), self.neighbours(chain)
        most = len(self.known) + _MOST_EACH
        while len(self.known) < most and (moved := next(moves, None)) is not None:
            limit = np.inf if value.lacking else value.seconds
            if (other := self.value(moved, limit)) < value:
                chain, value, moves = moved, other, self.neighbours(moved)
        return chain

    def _before(self, values: np.ndarray) -> list[float]:
        total = np.append(0.0, np.cumsum(values)) / max(values.sum(), TINY)
        return total[list(self.problem.cuts)].tolist()

    def _starts(self) -> Iterator[Chain]:
        """Yield stages in proportion to speed, or to memory, for plain orders of the devices."""
        cuts, link = self.problem.cuts, self.problem.devices.bytes_per_second
        by_speed = tuple(sorted(self._all, key=lambda d: -self._speeds[d]))
        orders = [tuple(self._all), by_speed, by_speed[::-1]]
        orders.append(tuple(sorted(self._all, key=lambda d: -self._memory[d])))
        for device in self._all:
            order = [device]
            while left := set(self._all) - set(order):
                last = order[-1]
                order.append(max(left, key=lambda d: (link[last, d], self._speeds[d], -d)))
            orders.append(tuple(order))
        most = len(cuts) - 1
        numbers = [most] if self.problem.all_cuts else range(1, min(len(by_speed), most) + 1)
        for order, number in itertools.product(dict.fromkeys(orders), numbers):
            groups = [_sorted(part.tolist()) for part in np.array_split(order, number)]
            yield self._in_proportion(groups)
            if np.isfinite(self._memory).all():
                yield self._chain(self._divided(groups, self._memory, self._bytes), groups)
        if 1 in numbers:
            hosts = self.problem.devices.hosts
            alone = [[d for d in self._all if hosts[d] == host] for host in sorted(set(hosts))]
            alone += [list(by_speed[:number]) for number in range(1, len(by_speed))]
            for group in alone:
                yield Chain((0, cuts[-1]), (_sorted(group),))

    def _in_proportion(self, groups: Sequence[Group]) -> Chain:
        return self._chain(self._divided(groups, self._speeds, self._work), groups)

    def _divided(
        self, groups: Sequence[Group], weights: list[float], before: list[float]
    ) -> tuple[int, ...]:
        """Return places of cuts between groups, so that stages are in proportion to weights."""
        parts = list(itertools.accumulate(sum(weights[d] for d in group) for group in groups))
        last, places = len(before) - 1, [0]
        for number, part in enumerate(parts[:-1]):
            goal = part / parts[-1]
            place = bisect.bisect_left(before, goal)
            if place and goal - before[place - 1] < before[min(place, last)] - goal:
                place -= 1
            places.append(min(max(place, places[-1] + 1), last - (len(groups) - 1 - number)))
        return (*places, last)

    def _chain(self, places: Sequence[int], groups: Sequence[Group]) -> Chain:
        return Chain(tuple(self.problem.cuts[place] for place in places), tuple(groups))

    def neighbours(self, chain: Chain) -> Iterator[Chain]:
        """Yield chains with other cuts, with devices elsewhere, and with a stage more or less."""
        places = [bisect.bisect_left(self.problem.cuts, cut) for cut in chain.cuts]
        yield from self._other_cuts(places, chain.groups)
        for groups in _regrouped(chain.groups, self._unused(chain)):
            yield Chain(chain.cuts, groups)
            yield self._in_proportion(groups)
        yield from self._exchanged(places, chain.groups)
        if not self.problem.all_cuts:
            yield from self._merged(chain)
            yield from self._split(places, chain)

    def _unused(self, chain: Chain) -> Group:
        used = set(itertools.chain(*chain.groups))
        return tuple(device for device in self._all if device not in used)

    def _other_cuts(self, places: list[int], groups: Sequence[Group]) -> Iterator[Chain]:
        """Yield chains with one or two neighbouring cuts up to 1, 2, 4 ... places away."""
        # A cut goes where the fewest bytes cross in the farther half of the way.
        for s, end in itertools.product(range(1, len(groups)), (1, 2)):
            if s + end > len(groups):
                continue
            low, high, by = places[s - 1] - places[s], places[s + end] - places[s + end - 1], 1
            while by < max(-low, high):
                for way in (-1, 1):
                    steps = [way * step for step in range(by // 2 + 1, by + 1)]
                    inside = [step for step in steps if low < step < high]
                    if inside:
                        step = min(inside, key=lambda step: self._crossing[places[s] + step])
                        moved = [place + step for place in places[s : s + end]]
                        yield self._chain([*places[:s], *moved, *places[s + end :]], groups)
                by *= 2

    def _exchanged(self, places: list[int], groups: tuple[Group, ...]) -> Iterator[Chain]:
        """Yield chains in which two neighbouring stages have changed places."""
        for s in range(1, len(groups)):
            others = (*groups[: s - 1], groups[s], groups[s - 1], *groups[s + 1 :])
            middle = places[s - 1] + places[s + 1] - places[s]
            yield self._chain([*places[:s], middle, *places[s + 1 :]], others)

    def _merged(self, chain: Chain) -> Iterator[Chain]:
        cuts, groups = chain
        for s in range(1, len(groups)):
            before, after = groups[s - 1 : s + 1]
            for group in (before, after, before + after):
                others = (*groups[: s - 1], _sorted(group), *groups[s + 1 :])
                yield Chain((*cuts[:s], *cuts[s + 1 :]), others)

    def _split(self, places: list[int], chain: Chain) -> Iterator[Chain]:
        """Yield chains with a stage more, which has one device."""
        if len(chain.groups) == len(self.problem.cuts) - 1:
            return
        unused = self._unused(chain)
        for s, group in enumerate(chain.groups):
            parts = [((d,), tuple(o for o in group if o != d)) for d in group if len(group) > 1]
            parts += [((device,), group) for device in unused]
            first, end = places[s : s + 2]
            for pair in itertools.chain(parts, [part[::-1] for part in parts]):
                groups = (*chain.groups[:s], *pair, *chain.groups[s + 1 :])
                yield self._in_proportion(groups)
                if end - first > 1:
                    one, other = (sum(self._speeds[d] for d in part) for part in pair)
                    low, high = self._work[first], self._work[end]
                    goal = low + (high - low) * one / (one + other)
                    place = min(max(bisect.bisect_left(self._work, goal), first + 1), end - 1)
                    yield self._chain([*places[: s + 1], place, *places[s + 1 :]], groups)


def _regrouped(groups: tuple[Group, ...], unused: Group) -> Iterator[tuple[Group, ...]]:
    """Yield groups with one device elsewhere, or two in each other's place; unused ones too."""
    every = [*groups, unused]

    def changed(one: int, first: Group, other: int, second: Group) -> tuple[Group, ...]:
        new = [*every]
        new[one], new[other] = _sorted(first), _sorted(second)
        return tuple(new[:-1])

    for one, other in itertools.permutations(range(len(every)), 2):
        if len(every[one]) > 1 or one == len(groups):
            for device in every[one]:
                rest = tuple(d for d in every[one] if d != device)
                yield changed(one, rest, other, (*every[other], device))
    for one, other in itertools.combinations(range(len(every)), 2):
        for device, second in itertools.product(every[one], every[other]):
            swap = {device: second, second: device}
            both = (tuple(swap.get(d, d) for d in every[number]) for number in (one, other))
            yield changed(one, next(both), other, next(both))


def _sorted(group: Sequence[int]) -> Group:
    return tuple(sorted(group))
