"""A lower bound of a step's time, much cheaper than its simulation."""

# With f, b and r the times of replica k of stage s for a forward pass, a backward pass and what is
# recomputed before it, n its micro-batches and h the most of them between forward and backward, a
# step takes at least enter + n (f + b + r) + wait + leave: `enter` is the way of a micro-batch to
# the stage, `leave` that of its gradient back to the first one, with an all-reduce at its end.
# The way from the stage to the last one and back, `beyond`, is a wait: after its first micro-batch
# the replica has only h - 1 forward passes to do, and before its last one's return only h - 1
# backward passes. So wait = max(0, beyond - (h - 1) f - r) + max(0, beyond - (h - 1) (b + r) - r),
# or the greater of both if all forward passes come first (n <= h). A link takes all its transfers
# one after the other, between the earliest first one and what follows its last one.

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from keras_het.planning.pipeline.plan import most_in_flight, routes_of
from keras_het.planning.pipeline.problem import TINY, Chain, Group, Link, Problem
from keras_het.planning.pipeline.recomputation import Memory

AHEAD_PER_CUT = (0, 1, 2)


class Value(NamedTuple):
    """What a chain lacks in bytes, and the least seconds of its step; the less, the better."""

    lacking: float
    seconds: float


NEVER = Value(float("inf"), float("inf"))


class Costs(NamedTuple):
    """A stage's seconds for a micro-batch on each replica, and who takes which."""

    forward: list[float]
    backward: list[float]
    routes: tuple[int, ...]
    counts: list[int]
    busy: float
    all_reduce: float
    least_forward: float
    least_backward: float


class Way(NamedTuple):
    """Transfers over a cut in one direction: the shortest one, and the seconds of all by link."""

    seconds: float
    links: tuple[tuple[Link, float], ...]


class LeastTime:
    """Bounds of the chains of a problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.memory = problem, Memory(problem)
        self._weights = problem.profile.weight_bytes.tolist()
        self._crossing = problem.profile.cut_bytes.tolist()
        self._returning = problem.profile.gradient_bytes.tolist()
        self._latency = problem.devices.latency_seconds.tolist()
        self._rate = problem.devices.bytes_per_second.tolist()
        self._all_reduce = functools.cache(problem.devices.all_reduce_terms)
        self.stage, self.ways = functools.cache(self._stage), functools.cache(self._both_ways)

    def of(self, chain: Chain, limit: float = np.inf) -> Value:
        """Return the value of a chain; if that has `limit` seconds or more, perhaps one between."""
        stages = map(self.stage, chain.cuts, chain.cuts[1:], chain.groups)
        busy = max(stage.busy for stage in stages)
        if busy == np.inf:
            return NEVER
        if busy >= limit:
            return Value(0.0, busy)
        step, least = _Step(self, chain), NEVER
        if step.links >= limit:
            return Value(0.0, step.links)
        # With memory enough, the more micro-batches are in flight, the less a stage waits.
        for more in reversed(self.ahead(chain)):
            least = min(least, step.value(more))
            if not step.short:
                break
        return least

    def ahead(self, chain: Chain) -> tuple[int, ...]:
        """Return how many micro-batches more for each cut are tried."""
        several = len(chain.groups) > 1 and self.problem.schedule == "1f1b"
        return AHEAD_PER_CUT if several else AHEAD_PER_CUT[:1]

    def at(self, chain: Chain, more: int) -> Value:
        """Return the value with `more` micro-batches ahead for each cut."""
        return _Step(self, chain).value(more)

    def _stage(self, first: int, end: int, group: Group) -> Costs:
        problem = self.problem
        columns = [problem.profile.columns[device] for device in group]
        forward = [sum(column[first:end]) for column, _ in columns]
        backward = [sum(column[first:end]) for _, column in columns]
        passes = 2 if problem.recompute == "always" else 1
        seconds = [max(passes * f + b, TINY) for f, b in zip(forward, backward, strict=True)]
        taken = routes_of(seconds, problem.num_micro_batches)
        counts = [taken.count(replica) for replica in range(len(group))]
        all_reduce = 0.0
        if len(group) > 1 and (weights := sum(self._weights[first:end])):
            once, per_byte = self._all_reduce(group)
            all_reduce = once + weights * per_byte
        busy = max(n * t for n, t in zip(counts, seconds, strict=True)) + all_reduce
        if not all(counts):
            busy = np.inf
        least = min(forward), min(backward)
        return Costs(forward, backward, taken, counts, busy, all_reduce, *least)

    def _both_ways(
        self, cut: int, senders: Group, takers: Group, sent: Group, taken: Group
    ) -> tuple[Way, Way]:
        pairs = [(senders[i], takers[k]) for i, k in zip(sent, taken, strict=True)]
        back = [(taker, sender) for sender, taker in pairs]
        return self._way(pairs, self._crossing[cut]), self._way(back, self._returning[cut])

    def _way(self, pairs: list[tuple[int, int]], num_bytes: float) -> Way:
        if num_bytes <= 0:
            return Way(0.0, ())
        seconds = {(a, b): self._latency[a][b] + num_bytes / self._rate[a][b] for a, b in pairs}
        links: dict[Link, float] = {}
        for pair in pairs:
            link = self.problem.devices.link(*pair)
            links[link] = links.get(link, 0.0) + seconds[pair]
        return Way(min(seconds.values()), tuple(links.items()))


class _Step:
    """A step of a chain."""

    def __init__(self, bounds: LeastTime, chain: Chain) -> None:
        self._problem, self._memory, self._chain = bounds.problem, bounds.memory, chain
        cuts, groups = chain
        self._stages = stages = list(map(bounds.stage, cuts, cuts[1:], groups))
        self._ways = ways = [
            bounds.ways(cuts[s], groups[s - 1], groups[s], stages[s - 1].routes, stages[s].routes)
            for s in range(1, len(stages))
        ]
        beyond = [0.0]
        for stage, (there, back) in zip(stages[:0:-1], ways[::-1], strict=True):
            passes = stage.least_forward + stage.least_backward
            beyond.append(beyond[-1] + passes + there.seconds + back.seconds)
        self._beyond = beyond[::-1]
        self.short = False
        self._enter, self._leave = [0.0], [stages[0].all_reduce]
        links: dict[Link, tuple[float, float, float]] = {}
        for s, (there, back) in enumerate(ways):
            begin = self._enter[s] + stages[s].least_forward
            rest = stages[s].least_backward + self._leave[s]
            away = self._beyond[s]
            for way, first, end in (
                (there, begin, away - there.seconds + rest),
                (back, begin + away - back.seconds, rest),
            ):
                for link, seconds in way.links:
                    work, earliest, least = links.get(link, (0.0, first, end))
                    links[link] = work + seconds, min(earliest, first), min(least, end)
            self._enter.append(begin + there.seconds)
            self._leave.append(max(stages[s + 1].all_reduce, back.seconds + rest))
        self.links = max(map(sum, links.values()), default=0.0)

    def value(self, more: int) -> Value:
        """Return the value with `more` micro-batches ahead for each cut."""
        problem, chain = self._problem, self._chain
        gpipe, always = problem.schedule == "gpipe", float(problem.recompute == "always")
        self.short = False
        lacking, seconds, later, returned = 0.0, self.links, 0, 0.0
        for s in reversed(range(len(self._stages))):
            stage, again, away, enter = self._stages[s], always, self._beyond[s], self._enter[s]
            if gpipe:
                held = tuple(stage.counts)
            else:
                ahead = later + len(stage.counts) - 1 + more * (len(self._stages) - 1 - s)
                held = most_in_flight(stage.routes, len(stage.counts), ahead if later else 0)
            if problem.limited:
                place = chain.cuts[s], chain.cuts[s + 1], chain.groups[s]
                lacks, part = self._memory.least(*place, held)
                if lacks or part:
                    lacking, again, self.short = lacking + lacks, max(again, part), True
            busy, first = 0.0, np.inf
            for f, b, n, h in zip(stage.forward, stage.backward, stage.counts, held, strict=True):
                r = again * f
                if gpipe:
                    begin = max(enter + n * f, returned)
                    first, spent = min(first, begin), begin + n * (b + r) - r
                else:
                    there = max(0.0, away - (h - 1) * f - r)
                    back = max(0.0, away - (h - 1) * (b + r) - r)
                    wait = there + back if n > h else max(there, back)
                    spent = enter + max(n * (f + b + r) + wait, -(-n // h) * (f + away + b))
                busy = max(busy, spent)
            seconds = max(seconds, busy + self._leave[s])
            later += len(stage.counts)
            if s:
                returned = first + stage.least_backward + self._ways[s - 1][1].seconds
        return Value(lacking, seconds)
