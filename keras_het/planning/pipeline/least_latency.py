r"""Dynamic program: the plan of least latency whose busiest stage and all-reduce are bounded.

For an order of the devices, a plan is a chain of stages over neighbouring cuts on groups of
neighbouring devices; devices between two groups stay unused. From the last stage to the first,

.. math::
    A(g, n, i) = \min_j latency_{g,n}(i, j) + B(g, n - |g|, j), \qquad
    B(g, n, j) = \min_{g' > g} latency_c(g, g', j) + A(g', n, j)

is the least latency of units from cut i on, where group g has the first stage and n devices are
used; n decides how many micro-batches are in flight and so the memory of the stage. B is 0 at the
last cut. Stages and transfers with steady > beta or all-reduce > rho are left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from keras_het.planning.bounded_shares import FloatArray
from keras_het.planning.pipeline.group_costs import GroupCosts, Problem

Group = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class ChainStage:
    """A stage from cut `row` to cut `column` on a group, with `used` devices from it on."""

    row: int
    column: int
    group: Group
    used: int


Chain = tuple[ChainStage, ...]


@dataclasses.dataclass(frozen=True)
class ChainCost:
    """The estimate of a chain, in seconds.

    Args:
        steady: that of the busiest stage or transfer.
        latency: sum over stages and transfers.
        all_reduce: the longest one.
    """

    steady: float
    latency: float
    all_reduce: float

    @property
    def seconds(self) -> float:
        """Estimated time of a step."""
        return self.steady + self.latency + self.all_reduce


def transfer_tables(
    problem: Problem, senders: Group, takers: Group
) -> tuple[FloatArray, FloatArray]:
    """Return steady and latency of the transfers between two stages at each cut, float64 [Q]."""
    devices, cuts = problem.devices, list(problem.cuts)
    steady, latency = np.zeros(len(cuts)), np.zeros(len(cuts))
    share = 1 / (len(senders) * len(takers))
    for table, (origins, targets) in (
        (problem.profile.cut_bytes, (senders, takers)),
        (problem.profile.gradient_bytes, (takers, senders)),
    ):
        crossing = table[cuts]
        loads: dict[object, list[float]] = {}
        for origin in origins:
            for target in targets:
                load = loads.setdefault(devices.link(origin, target), [0.0, 0.0])
                load[0] += share * devices.latency_seconds[origin, target]
                load[1] += share / devices.bytes_per_second[origin, target]
        for fixed, per_byte in loads.values():
            seconds = np.where(crossing > 0, fixed + crossing * per_byte, 0.0)
            latency += seconds
            steady = np.maximum(steady, (problem.micro_batches - 1) * seconds)
    return steady, latency


class LeastLatency:
    """The dynamic program for one order of the devices.

    Args:
        problem: what is planned.
        order: devices in the order of the pipeline.
        costs: returns the costs of a group; the same object for the same group.
    """

    def __init__(
        self, problem: Problem, order: tuple[int, ...], costs: Callable[[Group], GroupCosts]
    ) -> None:
        number = len(order)
        self._problem, self._costs = problem, costs
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
        self._group_costs = [costs(group) for group in self._groups]
        self._transfers = [
            self._transfers_from(group, after)
            for group, after in zip(self._groups, self._after, strict=True)
        ]
        self._best: FloatArray = np.zeros(0)
        self._rest: FloatArray = np.zeros(0)

    def _transfers_from(self, group: Group, after: int) -> tuple[FloatArray, FloatArray]:
        tables = [transfer_tables(self._problem, group, to) for to in self._groups[after:]]
        size = len(self._problem.cuts)
        steady = np.array([table[0] for table in tables]).reshape(-1, size)
        return steady, np.array([table[1] for table in tables]).reshape(-1, size)

    def solve(self, beta: float, rho: float) -> tuple[float, Chain]:
        """Return the least latency with steady <= beta and all-reduce <= rho, and its chain.

        The latency is infinite, and the chain empty, where there is none.
        """
        size, groups = len(self._problem.cuts), len(self._groups)
        depth = max(self._most_used) + 1 if self._counts_devices else 1
        # A and B above, [group, n, cut].
        best = np.full((groups, depth, size), np.inf)
        rest = np.full((groups, depth, size), np.inf)
        for number in range(groups - 1, -1, -1):
            after, replicas = self._after[number], len(self._groups[number])
            if after < groups:
                rest[number] = (best[after:] + self._links(number, beta)[:, None]).min(axis=0)
            rest[number, 0, -1] = 0.0
            for before in range(self._most_used[number] - replicas + 1 if depth > 1 else 1):
                following = rest[number, before]
                if np.isinf(following).all():
                    continue
                used = before + replicas if depth > 1 else 0
                table = self._stages(number, before + replicas, beta, rho)
                best[number, used] = (table + following).min(axis=1)
        self._best, self._rest = best, rest
        flat = int(best[:, :, 0].argmin())
        seconds = float(best[:, :, 0].flat[flat])
        if not np.isfinite(seconds):
            return np.inf, ()
        return seconds, self._chain(*divmod(flat, depth), beta, rho)

    def _links(self, number: int, beta: float) -> FloatArray:
        steady, latency = self._transfers[number]
        return np.where(steady <= beta, latency, np.inf)

    def _stages(self, number: int, used: int, beta: float, rho: float) -> FloatArray:
        costs = self._group_costs[number]
        steady, latency = costs.tables(self._variant(costs, used))
        return np.where((steady <= beta) & (costs.all_reduce <= rho), latency, np.inf)

    def _variant(self, costs: GroupCosts, used: int) -> int:
        return costs.variant(used if self._counts_devices else self._problem.devices.num_devices)

    def _chain(self, number: int, used: int, beta: float, rho: float) -> Chain:
        """Follow the minima from the first stage to the last."""
        chain, row, last = [], 0, len(self._problem.cuts) - 1
        counted = self._counts_devices
        while True:
            group = self._groups[number]
            before = used - len(group) if counted else 0
            table = self._stages(number, before + len(group), beta, rho)
            column = int((table[row] + self._rest[number, before]).argmin())
            chain.append(ChainStage(row, column, group, before + len(group)))
            if column == last:
                return tuple(chain)
            links = self._links(number, beta)[:, column]
            after = self._after[number]
            number = after + int((self._best[after:, before, column] + links).argmin())
            row, used = column, before

    def exact(self, chain: Chain) -> bool:
        """Make the costs of a chain's stages exact; return whether they were so already."""
        known = True
        for stage in chain:
            costs = self._costs(stage.group)
            known &= costs.exact(self._variant(costs, stage.used), stage.row, stage.column)
        return known

    def cost(self, chain: Chain) -> ChainCost:
        """Return the estimate of a chain."""
        steady = latency = reduce = 0.0
        for number, stage in enumerate(chain):
            costs = self._costs(stage.group)
            tables = costs.tables(self._variant(costs, stage.used))
            steady = max(steady, tables[0][stage.row, stage.column])
            latency += tables[1][stage.row, stage.column]
            reduce = max(reduce, costs.all_reduce[stage.row, stage.column])
            if number:
                moved = transfer_tables(self._problem, chain[number - 1].group, stage.group)
                steady = max(steady, moved[0][stage.row])
                latency += moved[1][stage.row]
        return ChainCost(float(steady), float(latency), float(reduce))
