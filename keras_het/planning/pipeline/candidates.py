"""Whole plans out of chains of stages: routes, recomputation, memory and simulated time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from keras_het.planning.pipeline.group_costs import GroupCosts, Problem
from keras_het.planning.pipeline.least_latency import Chain, ChainStage, Group
from keras_het.planning.pipeline.plan import PipelinePlan, Stage
from keras_het.planning.pipeline.recomputation import stage_memory
from keras_het.planning.pipeline.schedule import in_flight, routes
from keras_het.planning.pipeline.simulation import simulate

# How many micro-batches more than in DAPPLE's order may be on their way for each later cut; 2 is
# DAPPLE's order for slow links.
_AHEAD_PER_CUT = (0, 1, 2)
_ROUNDS = 4


class Candidates:
    """Plans of a problem, each simulated once.

    Args:
        problem: what is planned.
        costs: returns the costs of a group.
    """

    def __init__(self, problem: Problem, costs: Callable[[Group], GroupCosts]) -> None:
        self._problem, self._costs = problem, costs
        self._known: dict[tuple[tuple[int, int, Group], ...], PipelinePlan | None] = {}

    def best(self) -> PipelinePlan | None:
        """Return the fastest plan so far."""
        plans = [plan for plan in self._known.values() if plan is not None]
        return min(plans, key=lambda plan: plan.step_seconds, default=None)

    def add(self, chain: Chain) -> PipelinePlan | None:
        """Return the fastest plan with these stages, or None if it does not fit."""
        key = tuple((stage.row, stage.column, stage.group) for stage in chain)
        if key not in self._known:
            plans = [plan for plan in self._plans(chain) if plan is not None]
            self._known[key] = min(plans, key=lambda plan: plan.step_seconds, default=None)
        return self._known[key]

    def add_one_stage(self, group: Iterable[int]) -> PipelinePlan | None:
        """Return the plan of data parallelism on a group; without those that would get nothing."""
        members = list(group)
        profile = self._problem.profile
        seconds = (profile.forward_seconds + profile.backward_seconds).sum(axis=0)[members]
        used = sorted(set(routes(seconds, self._problem.micro_batches)))
        chosen = tuple(sorted(members[position] for position in used))
        return self.add((ChainStage(0, len(self._problem.cuts) - 1, chosen, len(chosen)),))

    def improve(self, chain: Chain) -> None:
        """Move one cut at a time to a neighbouring place, as long as the simulated step shrinks."""
        plan = self.add(chain)
        for _ in range(_ROUNDS if plan is not None else 0):
            before = plan
            for moved in _neighbours(chain):
                other = self.add(moved)
                if other is None or plan is None:
                    continue
                if other.step_seconds < plan.step_seconds:
                    chain, plan = moved, other
            if plan is before:
                return

    def stages(self, chain: Chain, ahead_per_cut: int = 0) -> tuple[Stage, ...]:
        """Return the stages of a chain, without recomputation."""
        problem = self._problem
        seconds = problem.profile.forward_seconds + problem.profile.backward_seconds
        if problem.recompute == "always":
            seconds = seconds + problem.profile.forward_seconds
        result = []
        for number, stage in enumerate(chain):
            first, end = problem.cuts[stage.row], problem.cuts[stage.column]
            taken = seconds[first:end, list(stage.group)].sum(axis=0)
            later = sum(len(other.group) for other in chain[number + 1 :])
            more = ahead_per_cut * (len(chain) - 1 - number)
            ahead = later + len(stage.group) - 1 + more if later and more else None
            turns = routes(taken, problem.micro_batches)
            result.append(Stage(first, end, stage.group, turns, ahead=ahead))
        return tuple(result)

    def _plans(self, chain: Chain) -> Iterator[PipelinePlan | None]:
        extra = _AHEAD_PER_CUT if self._problem.schedule == "1f1b" and len(chain) > 1 else (0,)
        for ahead_per_cut in extra:
            yield self._plan(chain, self.stages(chain, ahead_per_cut))

    def _plan(self, chain: Chain, stages: tuple[Stage, ...]) -> PipelinePlan | None:
        problem = self._problem
        memory = np.zeros(problem.devices.num_devices)
        chosen = []
        for number, stage in enumerate(stages):
            held = [
                in_flight(stages, number, replica, problem.schedule)
                for replica in range(len(stage.devices))
            ]
            units = self._costs(chain[number].group).recomputed(stage.first, stage.end, held)
            if units is None:
                return None
            chosen.append(dataclasses.replace(stage, recomputed=units))
            for device, d in zip(stage.devices, held, strict=True):
                memory[device] = stage_memory(problem.profile, stage.first, stage.end, d, units)
        plan = PipelinePlan(
            tuple(chosen),
            problem.micro_batches,
            problem.schedule,
            0.0,
            tuple(memory.tolist()),
            layer_names=problem.profile.names,
            device_names=problem.devices.names,
        )
        seconds = simulate(problem.profile, problem.devices, plan).step_seconds
        return dataclasses.replace(plan, step_seconds=seconds)


def _neighbours(chain: Chain) -> Iterator[Chain]:
    for number in range(1, len(chain)):
        before, after = chain[number - 1], chain[number]
        for row in (after.row - 1, after.row + 1):
            if before.row < row < after.column:
                yield (
                    *chain[: number - 1],
                    dataclasses.replace(before, column=row),
                    dataclasses.replace(after, row=row),
                    *chain[number + 1 :],
                )
