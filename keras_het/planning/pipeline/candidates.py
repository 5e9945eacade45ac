"""Whole plans out of chains of stages: routes, recomputation, memory and simulated time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from keras_het.planning.pipeline.least_latency import Chain, ChainStage, Group
from keras_het.planning.pipeline.plan import PipelinePlan, Stage
from keras_het.planning.pipeline.problem import Problem
from keras_het.planning.pipeline.recomputation import cheapest_recomputation, fits, stage_memory
from keras_het.planning.pipeline.schedule import in_flight, routes
from keras_het.planning.pipeline.simulation import simulate


def neighbours(chain: Chain, num_devices: int) -> Iterator[Chain]:
    """Yield chains that differ by one cut, one device, or two stages that become one."""
    for number in range(1, len(chain)):
        yield from _moved_cuts(chain, number)
    groups = [stage.group for stage in chain]
    used = {device for group in groups for device in group}
    unused = [device for device in range(num_devices) if device not in used]
    for number, group in enumerate(groups):
        for device in group:
            for other in unused:
                yield _with_groups(chain, {number: _without(group, device, other)})
            if len(group) > 1:
                yield _with_groups(chain, {number: _without(group, device)})
                for to in (number - 1, number + 1):
                    if 0 <= to < len(groups):
                        moved = _sorted((*groups[to], device))
                        yield _with_groups(chain, {number: _without(group, device), to: moved})
        for device in unused:
            yield _with_groups(chain, {number: _sorted((*group, device))})
    for number in range(1, len(chain)):
        before, after = chain[number - 1], chain[number]
        for group in (before.group, after.group, _sorted(before.group + after.group)):
            merged = ChainStage(before.row, after.column, group, 0)
            yield (*chain[: number - 1], merged, *chain[number + 1 :])


def _moved_cuts(chain: Chain, number: int) -> Iterator[Chain]:
    before, after = chain[number - 1], chain[number]
    for row in (after.row - 1, after.row + 1):
        if before.row < row < after.column:
            stages = dataclasses.replace(before, column=row), dataclasses.replace(after, row=row)
            yield (*chain[: number - 1], *stages, *chain[number + 1 :])


def _with_groups(chain: Chain, groups: dict[int, Group]) -> Chain:
    return tuple(
        dataclasses.replace(stage, group=groups.get(number, stage.group))
        for number, stage in enumerate(chain)
    )


def _without(group: Group, device: int, *others: int) -> Group:
    return _sorted((*(member for member in group if member != device), *others))


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
        self._known: dict[tuple[tuple[int, int, Group], ...], PipelinePlan | None] = {}

    def best(self) -> PipelinePlan | None:
        plans = [plan for plan in self._known.values() if plan is not None]
        return min(plans, key=lambda plan: plan.step_seconds, default=None)

    def add(self, chain: Chain, ahead: Sequence[int] = AHEAD_PER_CUT) -> PipelinePlan | None:
        """Return the fastest plan with these stages, or None if it does not fit."""
        key = _key(chain)
        if key not in self._known:
            if self._problem.schedule != "1f1b" or len(chain) == 1:
                ahead = (0,)
            best: PipelinePlan | None = None
            for more in ahead:
                plan = self._plan(chain, self.stages(chain, more))
                if plan is not None and (
                    best is None or plan.step_seconds < _WORTH_MEMORY * best.step_seconds
                ):
                    best = plan
            self._known[key] = best
        return self._known[key]

    def add_one_stage(self, group: Iterable[int]) -> PipelinePlan | None:
        """Return the plan of data parallelism on a group; without those that would get nothing."""
        members = list(group)
        profile = self._problem.profile
        seconds = (profile.forward_seconds + profile.backward_seconds).sum(axis=0)[members]
        used = sorted(set(routes(seconds, self._problem.micro_batches)))
        chosen = tuple(sorted(members[position] for position in used))
        return self.add((ChainStage(0, len(self._problem.cuts) - 1, chosen, len(chosen)),))

    def improve(self, chains: Iterable[Chain], most_plans: int) -> None:
        """Change the fastest of some chains a little while the simulated step gets shorter."""
        known = [(plan, chain) for chain in chains if (plan := self._known.get(_key(chain)))]
        known.sort(key=lambda pair: pair[0].step_seconds)
        for plan, chain in known[:_STARTS]:
            limit = len(self._known) + most_plans // min(len(known), _STARTS)
            self._descend(plan, chain, limit)

    def _descend(self, plan: PipelinePlan, chain: Chain, limit: int) -> None:
        first, used = plan.stages[0], sum(len(stage.devices) for stage in plan.stages)
        more = 0 if first.ahead is None else (first.ahead - used + 1) // (len(chain) - 1)
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

    def _recomputed(self, stage: Stage, held: list[int]) -> tuple[int, ...] | None:
        """Return the units that a stage recomputes, or None if it does not fit."""
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


def _key(chain: Chain) -> tuple[tuple[int, int, Group], ...]:
    return tuple((stage.row, stage.column, stage.group) for stage in chain)
