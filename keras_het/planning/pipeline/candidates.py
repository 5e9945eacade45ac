"""Plans of chains, each simulated once; those near the best ones are tried too."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterable

import numpy as np

from keras_het.planning.pipeline.least_time import Value
from keras_het.planning.pipeline.plan import PipelinePlan, Stage, in_flight
from keras_het.planning.pipeline.problem import Chain
from keras_het.planning.pipeline.recomputation import stage_memory
from keras_het.planning.pipeline.search import Search
from keras_het.planning.pipeline.simulation import simulate

# More micro-batches in flight need memory: a step must become shorter by 1 %.
_WORTH_MEMORY = 0.99
# How many chains are simulated at first, and near each of how many of the best ones.
_FIRST = 24
_EXPANDED = 18
_NEAR = 10


class Candidates:
    """Plans of the chains that a search knows."""

    def __init__(self, search: Search) -> None:
        self.problem, self._search, self._bounds = search.problem, search, search.bounds
        self._known: dict[Chain, PipelinePlan | None] = {}
        self._best: PipelinePlan | None = None
        # Chains that fit by their time; their neighbours are not yet known.
        self._to_expand: list[tuple[float, Chain]] = []

    @property
    def _best_seconds(self) -> float:
        return np.inf if self._best is None else self._best.step_seconds

    def improve(self) -> PipelinePlan | None:
        """Return the plan of the shortest step found, or None if none fits.

        The chains of the least bounds are simulated, then neighbours of the fastest ones.
        """
        self._simulate(self._search.known, _FIRST)
        for _ in range(_EXPANDED):
            if self._to_expand:
                _, chain = heapq.heappop(self._to_expand)
                moved = dict.fromkeys(self._search.neighbours(chain))
                values = {each: self._search.value(each, self._best_seconds) for each in moved}
                self._simulate(values, _NEAR)
        return self._best

    def _simulate(self, chains: dict[Chain, Value], most: int) -> None:
        """Simulate the chains of the least bounds until none can be the best one."""
        queue = [(value, chain) for chain, value in chains.items() if chain not in self._known]
        heapq.heapify(queue)
        while queue and most:
            value, chain = heapq.heappop(queue)
            if value.lacking or value.seconds >= self._best_seconds:
                break
            if (full := self._bounds.of(chain)) > value:
                heapq.heappush(queue, (full, chain))
            elif self.add(chain) is not None:
                most -= 1

    def one_stage(self, group: Iterable[int]) -> float:
        """Return the time of data parallelism on a group; devices that get nothing are left out."""
        units, members = self.problem.profile.num_units, tuple(group)
        used = sorted(set(self._bounds.stage(0, units, members).routes))
        plan = self.add(Chain((0, units), (tuple(members[position] for position in used),)))
        return np.inf if plan is None else plan.step_seconds

    def add(self, chain: Chain) -> PipelinePlan | None:
        """Return the fastest plan with these stages, or None if it does not fit."""
        if chain not in self._known:
            best: PipelinePlan | None = None
            goal = np.inf
            for more in self._bounds.ahead(chain):
                if best is None or self._bounds.at(chain, more).seconds < goal:
                    plan = self.plan(self.stages(chain, more))
                    if plan is not None and plan.step_seconds < goal:
                        best, goal = plan, _WORTH_MEMORY * plan.step_seconds
            self._known[chain] = best
            if best is not None:
                heapq.heappush(self._to_expand, (best.step_seconds, chain))
                if best.step_seconds < self._best_seconds:
                    self._best = best
        return self._known[chain]

    def stages(self, chain: Chain, more: int = 0) -> tuple[Stage, ...]:
        result = []
        for number, group in enumerate(chain.groups):
            first, end = chain.cuts[number : number + 2]
            later = sum(map(len, chain.groups[number + 1 :]))
            more_here = more * (len(chain.groups) - 1 - number)
            ahead = later + len(group) - 1 + more_here if later and more_here else None
            turns = self._bounds.stage(first, end, group).routes
            result.append(Stage(first, end, group, turns, ahead=ahead))
        return tuple(result)

    def plan(self, stages: tuple[Stage, ...]) -> PipelinePlan | None:
        problem = self.problem
        memory = [0.0] * problem.devices.num_devices
        chosen = []
        for number, stage in enumerate(stages):
            held = tuple(
                in_flight(stages, number, replica, problem.schedule)
                for replica in range(len(stage.devices))
            )
            place = stage.first, stage.end, stage.devices
            units = self._bounds.memory.recomputed(*place, held)
            if units is None or 0 in held:
                return None
            chosen.append(dataclasses.replace(stage, recomputed=units))
            for device, d in zip(stage.devices, held, strict=True):
                memory[device] = stage_memory(problem.profile, stage.first, stage.end, d, units)
        plan = PipelinePlan(
            tuple(chosen),
            problem.num_micro_batches,
            problem.schedule,
            0.0,
            tuple(memory),
            layer_names=problem.profile.names,
            device_names=problem.devices.names,
        )
        seconds = simulate(problem.profile, problem.devices, plan).step_seconds
        return dataclasses.replace(plan, step_seconds=seconds)
