"""Whole plans out of chains of stages: routes, recomputation, memory and simulated time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from keras_het.planning.pipeline.least_latency import Chain, Group
from keras_het.planning.pipeline.plan import PipelinePlan, Stage, in_flight, routes
from keras_het.planning.pipeline.problem import Problem
from keras_het.planning.pipeline.recomputation import cheapest_recomputation, fits, stage_memory
from keras_het.planning.pipeline.simulation import simulate


def neighbours(chain: Chain, num_devices: int) -> Iterator[Chain]:
    """Yield chains that differ by one cut, one device, or two stages that become one."""
    rows, groups = chain
    for number in range(1, len(groups)):
        for row in (rows[number] - 1, rows[number] + 1):
            if rows[number - 1] < row < rows[number + 1]:
                yield Chain((*rows[:number], row, *rows[number + 1 :]), groups)
    used = {device for group in groups for device in group}
    unused = [device for device in range(num_devices) if device not in used]
    for number, group in enumerate(groups):
        for device in group:
            rest = tuple(member for member in group if member != device)
            for other in unused:
                yield _with_groups(chain, {number: (*rest, other)})
            if rest:
                yield _with_groups(chain, {number: rest})
                for to in (number - 1, number + 1):
                    if 0 <= to < len(groups):
                        yield _with_groups(chain, {number: rest, to: (*groups[to], device)})
        for device in unused:
            yield _with_groups(chain, {number: (*group, device)})
    for number in range(1, len(groups)):
        before, after = groups[number - 1 : number + 1]
        for group in (before, after, before + after):
            merged = (*groups[: number - 1], _sorted(group), *groups[number + 1 :])
            yield Chain((*rows[:number], *rows[number + 1 :]), merged)


def _with_groups(chain: Chain, changed: dict[int, Group]) -> Chain:
    groups = enumerate(chain.groups)
    return chain._replace(groups=tuple(_sorted(changed.get(n, group)) for n, group in groups))


def _sorted(group: Iterable[int]) -> Group:
    return tuple(sorted(group))


AHEAD_PER_CUT = (0, 1, 2)
# More micro-batches in flight need memory: a step must become shorter by 1 %.
_WORTH_MEMORY = 0.99
_STARTS = 3


class Candidates:
    """Plans of a problem, each simulated once."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._choices: dict[tuple[int, int, Group, tuple[int, ...]], tuple[int, ...] | None] = {}
        self._known: dict[Chain, PipelinePlan | None] = {}

    def best(self) -> PipelinePlan | None:
        plans = [plan for plan in self._known.values() if plan is not None]
        return min(plans, key=lambda plan: plan.step_seconds, default=None)

    def add(self, chain: Chain, ahead: Sequence[int] = AHEAD_PER_CUT) -> PipelinePlan | None:
        """Return the fastest plan with these stages, or None if it does not fit."""
        if chain not in self._known:
            if self._problem.schedule != "1f1b" or len(chain.groups) == 1:
                ahead = (0,)
            best: PipelinePlan | None = None
            for more in ahead:
                plan = self._plan(chain, self.stages(chain, more))
                if plan is not None and (
                    best is None or plan.step_seconds < _WORTH_MEMORY * best.step_seconds
                ):
                    best = plan
            self._known[chain] = best
        return self._known[chain]

    def add_one_stage(self, group: Iterable[int]) -> PipelinePlan | None:
        """Return the plan of data parallelism on a group; without those that would get nothing."""
        members = list(group)
        profile = self._problem.profile
        seconds = (profile.forward_seconds + profile.backward_seconds).sum(axis=0)[members]
        used = sorted(set(routes(seconds, self._problem.micro_batches)))
        chosen = _sorted(members[position] for position in used)
        return self.add(Chain((0, len(self._problem.cuts) - 1), (chosen,)))

    def improve(self, chains: Iterable[Chain], most_plans: int) -> None:
        """Change the fastest of some chains a little while the simulated step gets shorter."""
        known = [(plan, chain) for chain in chains if (plan := self._known.get(chain))]
        known.sort(key=lambda pair: pair[0].step_seconds)
        for plan, chain in known[:_STARTS]:
            limit = len(self._known) + most_plans // min(len(known), _STARTS)
            self._descend(plan, chain, limit)

    def _descend(self, plan: PipelinePlan, chain: Chain, limit: int) -> None:
        first, used = plan.stages[0], sum(len(stage.devices) for stage in plan.stages)
        more = 0 if first.ahead is None else (first.ahead - used + 1) // (len(plan.stages) - 1)
        ahead = tuple({0, more})
        improved = True
        while improved:
            improved = False
            for moved in neighbours(chain, self._problem.devices.num_devices):
                if len(self._known) >= limit:
                    return
                other = self.add(moved, ahead)
                if other is not None and other.step_seconds < plan.step_seconds:
                    chain, plan, improved = moved, other, True
                    break

    def stages(self, chain: Chain, ahead_per_cut: int = 0) -> tuple[Stage, ...]:
        problem = self._problem
        seconds = problem.profile.forward_seconds + problem.profile.backward_seconds
        if problem.recompute == "always":
            seconds = seconds + problem.profile.forward_seconds
        cuts = [problem.cuts[row] for row in chain.rows]
        result = []
        for number, group in enumerate(chain.groups):
            first, end = cuts[number : number + 2]
            taken = seconds[first:end, list(group)].sum(axis=0)
            later = sum(map(len, chain.groups[number + 1 :]))
            more = ahead_per_cut * (len(chain.groups) - 1 - number)
            ahead = later + len(group) - 1 + more if later and more else None
            turns = routes(taken, problem.micro_batches)
            result.append(Stage(first, end, group, turns, ahead=ahead))
        return tuple(result)

    def _recomputed(self, stage: Stage, held: list[int]) -> tuple[int, ...] | None:
        problem, (first, end) = self._problem, (stage.first, stage.end)
        limits = problem.devices.memory_bytes[list(stage.devices)].tolist()
        if problem.recompute == "auto":
            seconds = problem.recomputation_seconds(stage.devices)
            return cheapest_recomputation(problem.profile, first, end, held, limits, seconds)
        units = tuple(range(first, end)) if problem.recompute == "always" else ()
        needed = [stage_memory(problem.profile, first, end, d, units) for d in held]
        return units if all(map(fits, needed, limits)) else None

    def _plan(self, chain: Chain, stages: tuple[Stage, ...]) -> PipelinePlan | None:
        problem = self._problem
        memory = np.zeros(problem.devices.num_devices)
        chosen = []
        for number, stage in enumerate(stages):
            held = [
                in_flight(stages, number, replica, problem.schedule)
                for replica in range(len(stage.devices))
            ]
            choice = (stage.first, stage.end, stage.devices, tuple(held))
            if choice not in self._choices:
                self._choices[choice] = self._recomputed(stage, held)
            units = self._choices[choice]
            if units is None or 0 in held:
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
