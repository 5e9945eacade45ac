r"""Dynamic program: the plan of least latency whose busiest stage and all-reduce are bounded.

For an order of the devices, a plan is a chain of stages over neighbouring cuts on groups of
neighbouring devices; devices between two groups stay unused. From the last stage to the first,

.. math::
    A(g, n, i) = \min_j latency_{g,n}(i, j) + B(g, n - |g|, j), \qquad
    B(g, n, j) = \min_{g' > g} latency_c(g, g', j) + A(g', n, j)

is the least latency of units from cut i on, where group g has the first stage and n devices are
used; n decides how many micro-batches are in flight and so the memory of the stage. B is 0 at the
last cut. Stages and transfers with steady > beta or all-reduce > rho are left out.

Replica k of a stage takes t_k for a micro-batch and gets n_k of the M micro-batches, as `routes`
would give them. The estimate of a step is

.. math:: \max(\max_s steady_s, \max_c steady_c) + \sum_s latency_s + \sum_c latency_c + \max_s AR_s

.. math::
    latency_s = \sum_k n_k t_k / M, \qquad steady_s = \max_k n_k t_k - latency_s

that is: the busiest stage works without a pause, and the first and the last micro-batch pass
through all others (DAPPLE's latency with a pivot stage). A transfer c counts as a stage whose
micro-batches are spread evenly over all pairs of replicas. With one stage the estimate is exact.

Recomputation of units X multiplies both by (latency + R) / latency, where R is the mean of the
replicas' times for X, weighted by their speed. For every possible stage there is a lower bound of R
(the fractional knapsack); `exact` finds R itself, for the stages that matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from keras_het.planning.pipeline.problem import TINY, Problem
from keras_het.planning.pipeline.recomputation import (
    cheapest_recomputation,
    least_recomputation_seconds,
    needed_savings,
)
from keras_het.planning.shares import FloatArray, IntArray


class GroupCosts:
    """Costs of the stages between any two cuts, as replicas on a group of devices.

    How much a stage recomputes depends on how many micro-batches are in flight, and so on its
    window: the number of devices from the stage on. Windows with the same costs share a variant.
    """

    def __init__(self, problem: Problem, group: tuple[int, ...]) -> None:
        self._problem, members = problem, list(group)
        profile, cuts = problem.profile, np.asarray(problem.cuts)
        self._rows, self._columns = np.triu_indices(len(cuts), 1)
        if problem.all_cuts:
            self._rows, self._columns = np.arange(len(cuts) - 1), np.arange(1, len(cuts))
        self._first, self._end = cuts[self._rows], cuts[self._columns]
        forward = profile.forward_seconds[:, members]
        seconds = forward + profile.backward_seconds[:, members]
        if problem.recompute == "always":
            seconds = seconds + forward
        times = np.maximum(self._sums(seconds).T, TINY)
        counts = _counts(times, problem.micro_batches)
        totals = counts * times
        self._latency = totals.sum(axis=0) / problem.micro_batches
        self._steady = np.maximum(totals.max(axis=0) - self._latency, 0.0)
        self._limits = problem.devices.memory_bytes[members]
        self._unit_seconds = problem.recomputation_seconds(group)
        windows = np.arange(len(group), max(len(group), problem.devices.num_devices) + 1)
        flights = self._in_flight(times, counts, windows)
        # More devices mean more micro-batches in flight, or as many.
        new = np.append(True, (flights[1:] != flights[:-1]).any(axis=(1, 2)))
        self.variants: IntArray = np.cumsum(new) - 1
        self._flights = flights[new]
        again, exact = self._recomputation()
        possible = (counts > 0).all(axis=0)
        factor = np.where(possible, (self._latency + again) / self._latency, np.inf)
        self.steady = self._table(_times(self._steady, factor))
        self.latency = self._table(_times(self._latency, factor))
        self._exact = self._table(exact) == 1
        weights = self._sums(profile.weight_bytes)
        fixed, per_byte = problem.devices.all_reduce_terms(group)
        self.all_reduce = self._table(np.where(weights > 0, fixed + weights * per_byte, 0.0))

    def exact(self, variant: int, row: int, column: int) -> bool:
        """Make the costs of one stage exact; return whether they were so already."""
        if self._exact[variant, row, column]:
            return True
        self._exact[variant, row, column] = True
        stage = int(np.flatnonzero((self._rows == row) & (self._columns == column))[0])
        chosen = cheapest_recomputation(
            self._problem.profile,
            int(self._first[stage]),
            int(self._end[stage]),
            self._flights[variant, :, stage].tolist(),
            self._limits.tolist(),
            self._unit_seconds,
        )
        again = np.inf if chosen is None else self._unit_seconds[list(chosen)].sum()
        factor = np.asarray(1 + again / self._latency[stage])
        before = self.latency[variant, row, column]
        self.steady[variant, row, column] = _times(self._steady[stage], factor)
        self.latency[variant, row, column] = _times(self._latency[stage], factor)
        return bool(np.isclose(before, self.latency[variant, row, column], 1e-12, 0))

    def _sums(self, values: FloatArray) -> FloatArray:
        """Return the sum over the units of each stage, [stages, ...]."""
        total = np.concatenate([np.zeros((1, *values.shape[1:])), np.cumsum(values, axis=0)])
        difference: FloatArray = total[self._end] - total[self._first]
        return difference

    def _table(self, values: FloatArray) -> FloatArray:
        """Return numbers of each stage as tables over cuts, [..., Q, Q]."""
        size = len(self._problem.cuts)
        table = np.full((*values.shape[:-1], size, size), np.inf)
        table[..., self._rows, self._columns] = values
        return table

    def _in_flight(self, times: FloatArray, counts: IntArray, windows: IntArray) -> IntArray:
        """Return at least the micro-batches in flight, int64 [windows, replicas, stages].

        While a replica finishes c of them, replica k finishes at least floor((c - 1) t / t_k)
        others, and all of them are in the window.
        """
        if np.isinf(self._limits).all():
            return np.ones((len(windows), *counts.shape), np.int64)
        if self._problem.schedule == "gpipe":
            return np.repeat(counts[None], len(windows), axis=0)
        looks = [row.tobytes() for row in times]
        kinds = {look: number for number, look in enumerate(dict.fromkeys(looks))}
        kind = np.array([kinds[look] for look in looks])
        first = [looks.index(look) for look in kinds]
        number = np.bincount(kind)
        # Micro-batches of each kind of device in the time of one of each kind.
        rates = times[first][:, None] / times[first] * (1 + 1e-12)
        flights = np.ones((len(windows), *times[first].shape), np.int64)
        for c in range(2, int(windows[-1]) + 1):
            others = np.einsum("v,uvp->up", number, np.floor((c - 1) * rates)) - (c - 1)
            more = c + others <= windows[:, None, None]
            if not more.any():
                break
            flights += more
        flights[windows == len(times)] = 1
        return np.minimum(counts, flights[:, kind])

    def _recomputation(self) -> tuple[FloatArray, FloatArray]:
        """Return a lower bound of the time to recompute, [variants, stages], and 1 where exact."""
        profile, recompute = self._problem.profile, self._problem.recompute
        flights = self._flights.swapaxes(0, 1)
        limits = self._limits[:, None, None]
        activations = self._sums(profile.activation_bytes)
        held = self._sums(profile.state_bytes) + activations * np.ones_like(flights)
        if recompute == "always":
            need, _ = needed_savings(
                held + flights * profile.cut_bytes[self._first], limits, np.ones_like(flights)
            )
        else:
            need, _ = needed_savings(held + (flights - 1) * activations, limits, flights)
        again, exact = np.where(need > 0, np.inf, 0.0), np.ones(need.shape)
        short = (need > 0) & np.isfinite(need)
        if recompute == "auto" and short.any():
            again[short] = least_recomputation_seconds(
                profile.activation_bytes,
                self._unit_seconds,
                (self._first, self._end),
                self._problem.least_cuts[self._rows, self._columns],
                np.nonzero(short)[1],
                need[short],
                flights.max(axis=0)[short],
            )
            exact[short] = 0
        return again, exact


def _times(seconds: FloatArray, factor: FloatArray) -> FloatArray:
    finite = np.isfinite(factor)
    product: FloatArray = np.where(finite, seconds * np.where(finite, factor, 0.0), np.inf)
    return product


def _counts(times: FloatArray, micro_batches: int) -> IntArray:
    """Return how many micro-batches `routes` gives to each replica, int64 [replicas, stages]."""
    # All that end before the time of a perfectly even distribution are among the first M to end;
    # what is left is given away one by one.
    even = micro_batches / (1 / times).sum(axis=0) * (1 - 1e-12)
    counts = np.floor(even / times).astype(np.int64)
    columns = np.arange(times.shape[1])
    while len(columns):
        left = counts[:, columns].sum(axis=0) < micro_batches
        columns = columns[left]
        replica = ((counts[:, columns] + 1) * times[:, columns]).argmin(axis=0)
        counts[replica, columns] += 1
    return counts


def _transfers(
    problem: Problem, groups: Sequence[tuple[int, ...]], after: Sequence[int]
) -> list[tuple[FloatArray, FloatArray]]:
    r"""Return steady and latency of the transfers from each group to those from `after` on, [., Q].

    Micro-batches are spread evenly over all pairs of a sender and a taker. A transfer of b bytes
    takes the mean of latency + b / rate over the pairs, forward and backward. A link carries all
    its pairs one after the other; the busiest link has at most

    .. math:: (M - 1) (\max_{link} \sum_{pairs} share \cdot latency
        + b \max_{link} \sum_{pairs} share / rate)

    of work after its first micro-batch, in either direction.
    """
    hosts = np.array(problem.devices.hosts)
    members = np.zeros((len(groups), len(hosts)))
    for number, group in enumerate(groups):
        members[number, list(group)] = 1
    size = members.sum(axis=1)
    share = 1 / (size[:, None] * size)
    with np.errstate(divide="ignore"):
        tables = [problem.devices.latency_seconds, 1 / problem.devices.bytes_per_second]
    ways = []
    for num_bytes, there in (
        (problem.profile.cut_bytes, tables),
        (problem.profile.gradient_bytes, [table.T for table in tables]),
    ):
        # Seconds and seconds per byte of each pair of groups, [G, G].
        mean = [share * (members @ table @ members.T) for table in there]
        most = [share * _busiest(members, hosts, table) for table in there]
        ways.append((num_bytes[list(problem.cuts)], mean, most))
    result = []
    for sender, first in enumerate(after):
        rows = slice(first, None)
        latency: FloatArray = np.zeros(())
        steady: FloatArray = np.zeros(())
        for crossing, mean, most in ways:
            any_bytes = crossing > 0
            once = mean[0][sender, rows, None] * any_bytes
            latency = latency + once + mean[1][sender, rows, None] * crossing
            once = most[0][sender, rows, None] * any_bytes
            steady = np.maximum(steady, once + most[1][sender, rows, None] * crossing)
        result.append(((problem.micro_batches - 1) * steady, latency))
    return result


def _busiest(members: FloatArray, hosts: IntArray, table: FloatArray) -> FloatArray:
    """Return the sum of a table over the pairs of the link where it is greatest, float64 [G, G]."""
    most = np.zeros((len(members), len(members)))
    for host in np.unique(hosts):
        inside = table * ((hosts == host)[:, None] & (hosts == host))
        from_group = np.array([inside[group > 0].max(axis=0) for group in members])
        for number, group in enumerate(members):
            most[:, number] = np.maximum(most[:, number], from_group[:, group > 0].max(axis=1))
        for other in np.unique(hosts):
            if other != host:
                sums = (members * (hosts == host)) @ table @ (members * (hosts == other)).T
                most = np.maximum(most, sums)
    return most


Group = tuple[int, ...]


class Chain(NamedTuple):
    """Stages: stage s has the units from `cuts[s]` to before `cuts[s + 1]`, on `groups[s]`."""

    cuts: tuple[int, ...]
    groups: tuple[Group, ...]


class LeastLatency:
    """The dynamic program for one order of the devices."""

    def __init__(
        self,
        problem: Problem,
        order: tuple[int, ...],
        known: dict[Group, GroupCosts] | None = None,
    ) -> None:
        """Add the costs of the order's groups to those that other orders have made known."""
        number = len(order)
        self._problem, self.order = problem, order
        self._costs = {} if known is None else known
        # Whether the memory of a stage depends on the number of devices that come after it.
        limited = np.isfinite(problem.devices.memory_bytes[list(order)]).any()
        self._counts_devices = bool(limited) and problem.schedule == "1f1b"
        spans = [
            (low, high)
            for low in range(number)
            for high in range(low + 1, min(number, low + problem.micro_batches) + 1)
        ]
        self._groups = [tuple(sorted(order[low:high])) for low, high in spans]
        self._after = [
            next((k for k, (low, _) in enumerate(spans) if low >= high), len(spans))
            for _, high in spans
        ]
        self._most_used = [number - low for low, _ in spans]
        for group in self._groups:
            if group not in self._costs:
                self._costs[group] = GroupCosts(problem, group)
        self._group_costs = [self._costs[group] for group in self._groups]
        self._links = _transfers(problem, self._groups, self._after)
        self._best: FloatArray = np.zeros(0)
        self._rest: FloatArray = np.zeros(0)

    def solve(self, beta: float, rho: float) -> tuple[float, Chain]:
        """Return the least latency within both bounds, and its chain; infinite without stages."""
        size, groups = len(self._problem.cuts), len(self._groups)
        depth = max(self._most_used) + 1 if self._counts_devices else 1
        # A and B above, [group, n, cut].
        best = np.full((groups, depth, size), np.inf)
        rest = np.full((groups, depth, size), np.inf)
        for number in range(groups - 1, -1, -1):
            after, costs = self._after[number], self._group_costs[number]
            if after < groups:
                links = _bounded(*self._links[number], beta)[:, None]
                (best[after:] + links).min(axis=0, out=rest[number])
            rest[number, 0, -1] = 0.0
            stages = _bounded(costs.steady, costs.latency, beta)
            if costs.all_reduce[0, -1] > rho:
                stages = np.where(costs.all_reduce <= rho, stages, np.inf)
            if depth == 1:
                (stages[0] + rest[number, 0]).min(axis=1, out=best[number, 0])
                continue
            replicas = len(self._groups[number])
            windows = self._most_used[number] - replicas + 1
            used = stages[costs.variants[:windows]]
            used += rest[number, :windows, None]
            used.min(axis=2, out=best[number, replicas : replicas + windows])
        self._best, self._rest = best, rest
        flat = int(best[:, :, 0].argmin())
        seconds = float(best[:, :, 0].flat[flat])
        if not np.isfinite(seconds):
            return np.inf, Chain((), ())
        return seconds, self._chain(*divmod(flat, depth), beta, rho)

    def _chain(self, number: int, used: int, beta: float, rho: float) -> Chain:
        rows, groups, last = [0], [], len(self._problem.cuts) - 1
        while True:
            group, costs = self._groups[number], self._group_costs[number]
            before = used - len(group) if self._counts_devices else 0
            variant, row = costs.variants[before], rows[-1]
            stages = _bounded(costs.steady[variant, row], costs.latency[variant, row], beta)
            stages = np.where(costs.all_reduce[row] <= rho, stages, np.inf)
            column = int((stages + self._rest[number, before]).argmin())
            rows.append(column)
            groups.append(group)
            if column == last:
                return Chain(tuple(self._problem.cuts[row] for row in rows), tuple(groups))
            links = _bounded(*self._links[number], beta)[:, column]
            after = self._after[number]
            number = after + int((self._best[after:, before, column] + links).argmin())
            used = before

    def exact(self, chain: Chain) -> bool:
        """Make the costs of a chain's stages exact; return whether they were so already."""
        return all([costs.exact(*place) for costs, *place in self._stages(chain)])

    def cost(self, chain: Chain) -> tuple[float, float, float]:
        """Return steady, latency and all-reduce of a chain; their sum estimates the step."""
        steady = latency = reduce = 0.0
        places = [self._groups.index(group) for group in chain.groups]
        for number, (costs, variant, row, column) in enumerate(self._stages(chain)):
            steady = max(steady, costs.steady[variant, row, column])
            latency += costs.latency[variant, row, column]
            reduce = max(reduce, costs.all_reduce[row, column])
            if number:
                sender = places[number - 1]
                taker = places[number] - self._after[sender]
                steady = max(steady, self._links[sender][0][taker, row])
                latency += self._links[sender][1][taker, row]
        return float(steady), float(latency), float(reduce)

    def _stages(self, chain: Chain) -> Iterator[tuple[GroupCosts, int, int, int]]:
        """Yield the costs of each stage, and its variant, row and column in their tables."""
        rows = list(map(self._problem.cuts.index, chain.cuts))
        for number, group in enumerate(chain.groups):
            costs, later = self._costs[group], sum(map(len, chain.groups[number + 1 :]))
            yield costs, int(costs.variants[later]), rows[number], rows[number + 1]


def _bounded(steady: FloatArray, latency: FloatArray, beta: float) -> FloatArray:
    """Return the latency where steady is within the bound, and infinite elsewhere."""
    return latency if np.isinf(beta) else np.where(steady <= beta, latency, np.inf)
