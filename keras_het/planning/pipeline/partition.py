"""The plan of a pipeline: which units run where, or that it is better not to cut the model."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from keras_het.planning.pipeline.least_latency import Chain, Group, LeastLatency
from keras_het.planning.pipeline.plan import (
    PipelinePlan,
    Stage,
    in_flight,
    readable_bytes,
    routes,
)
from keras_het.planning.pipeline.problem import Devices, ModelProfile, Problem
from keras_het.planning.pipeline.recomputation import cheapest_recomputation, fits, stage_memory
from keras_het.planning.pipeline.refinement import coarse_cuts, device_orders, find_chains
from keras_het.planning.pipeline.simulation import simulate

# How many of the fastest chains are simulated, and how many plans near them; for large ones fewer.
_SIMULATED = (5, 24)
_NEAR = (30, 400)
_SIMULATED_PASSES = 2e4


def plan_pipeline(
    profile: ModelProfile,
    devices: Devices,
    micro_batches: int,
    schedule: str = "1f1b",
    recompute: str = "auto",
    *,
    tolerance: float = 0.002,
) -> PipelinePlan:
    """Choose stages, their devices and what they recompute, so that a step is short.

    Every stage has neighbouring units and one or several devices (replicas, which take whole
    micro-batches by their speed). One stage on several devices is data parallelism, one stage on
    one device no parallelism at all; slow devices may stay unused. The plans of least estimated
    time (`search`) are simulated together with data parallelism and each device alone, and the
    fastest of them is the result.

    Args:
        profile: costs of the model.
        devices: devices and links; as many as the profile has.
        micro_batches: micro-batches of a step, M.
        schedule: "1f1b", or "gpipe" (all forward passes first; needs more memory).
        recompute: "auto" recomputes the cheapest units that make a stage fit, "never" none,
            "always" all.
        tolerance: how much slower the estimate may be than the optimum, as a fraction.

    Raises:
        ValueError: if an argument is not valid, or no plan fits into memory; the message says which
            device lacks how many bytes.

    References:
        Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019
        (dynamic program over layers and devices).
        Zhan and Zhang, "Pipe-Torch: Pipeline-Based Distributed Deep Learning in a GPU Cluster with
        Heterogeneous Networking", CBD 2019 (unequal links, recomputation inside).
    """
    cuts = profile.allowed_cuts()
    return _plan(Problem(profile, devices, micro_batches, schedule, recompute, cuts), tolerance)


def plan_with_cuts(
    profile: ModelProfile,
    devices: Devices,
    cuts: Sequence[int],
    micro_batches: int,
    schedule: str = "1f1b",
    recompute: str = "auto",
    *,
    tolerance: float = 0.002,
) -> PipelinePlan:
    """Choose the devices of stages whose cuts are given.

    Args:
        profile: costs of the model.
        devices: devices and links; as many as the profile has.
        cuts: the first unit of each stage but the first one, rising.
        micro_batches: micro-batches of a step, M.
        schedule: as in `plan_pipeline`.
        recompute: as in `plan_pipeline`.
        tolerance: as in `plan_pipeline`.

    Raises:
        ValueError: if a cut is not valid, there are more stages than devices, or no plan fits.
    """
    allowed = profile.allowed_cuts()
    chosen = (0, *cuts, profile.num_units)
    if any(before >= after for before, after in itertools.pairwise(chosen)):
        raise ValueError(
            f"Cuts must rise, from 1 to {profile.num_units - 1}. Received: {list(cuts)}. "
            "Give the number of the first unit of every stage but the first."
        )
    for cut in chosen:
        if cut not in allowed:
            pair = next(p for p in profile.together if p[0] < cut <= p[1])
            first, last = (profile.names[unit] for unit in pair)
            raise ValueError(
                f"Units from {first} to {last} share weights and must be in one stage. "
                f"Received: a cut before {profile.names[cut]}. Cut before {first} or after {last}."
            )
    if len(chosen) - 1 > devices.num_devices:
        raise ValueError(
            f"Every stage needs a device of its own. Received: {len(chosen) - 1} stages, "
            f"{devices.num_devices} devices. Leave out cuts."
        )
    problem = Problem(profile, devices, micro_batches, schedule, recompute, chosen, all_cuts=True)
    return _plan(problem, tolerance)


def _plan(problem: Problem, tolerance: float) -> PipelinePlan:
    candidates = Candidates(problem)
    chains = find_chains(problem, tolerance)
    plans = _SIMULATED_PASSES / (problem.micro_batches * len(chains[0].groups)) if chains else 0
    for chain in chains[: int(np.clip(plans / 8, *_SIMULATED))]:
        candidates.add(chain)
    if chains and not problem.all_cuts:
        candidates.improve(chains, int(np.clip(plans, *_NEAR)))
    alternatives = () if problem.all_cuts else _without_pipeline(problem, candidates)
    best = candidates.best()
    if best is None:
        # The estimates of memory are upper bounds: what lacks least may fit after all.
        chain = least_short(problem)
        best = candidates.add(chain)
        if best is None:
            raise ValueError(explain_shortage(problem, chain))
    return dataclasses.replace(best, alternatives=alternatives)


def _without_pipeline(problem: Problem, candidates: Candidates) -> tuple[tuple[str, float], ...]:
    """Add plans with one stage; return data parallelism on all devices, and the best alone."""
    profile, devices = problem.profile, problem.devices
    seconds = (profile.forward_seconds + profile.backward_seconds).sum(axis=0)
    by_speed = np.argsort(seconds, kind="stable").tolist()
    groups = [by_speed[:number] for number in range(2, len(by_speed))]
    groups += [
        [device for device in by_speed if devices.hosts[device] == host]
        for host in sorted(set(devices.hosts))
    ]
    for group in groups:
        candidates.add_one_stage(group)
    together = candidates.add_one_stage(by_speed)
    alone = [candidates.add_one_stage([device]) for device in by_speed]
    fastest = min((plan.step_seconds for plan in alone if plan is not None), default=np.inf)
    result = [("one device", float(fastest))]
    if len(by_speed) > 1:
        data_parallel = together.step_seconds if together is not None else np.inf
        result.insert(0, ("data parallelism on all devices", float(data_parallel)))
    return tuple(result)


def neighbours(problem: Problem, chain: Chain) -> Iterator[Chain]:
    """Yield chains that differ by one cut, one device, or two stages that become one."""
    cuts, groups = chain
    for number in range(1, len(groups)):
        place = problem.cuts.index(cuts[number])
        for cut in problem.cuts[place - 1 : place + 2 : 2]:
            if cuts[number - 1] < cut < cuts[number + 1]:
                yield Chain((*cuts[:number], cut, *cuts[number + 1 :]), groups)
    used = {device for group in groups for device in group}
    unused = [device for device in range(problem.devices.num_devices) if device not in used]
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
            yield Chain((*cuts[:number], *cuts[number + 1 :]), merged)


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
                plan = self._plan(self.stages(chain, more))
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
        return self.add(Chain((0, profile.num_units), (chosen,)))

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
        moves = neighbours(self._problem, chain)
        while len(self._known) < limit and (moved := next(moves, None)) is not None:
            other = self.add(moved, ahead)
            if other is not None and other.step_seconds < plan.step_seconds:
                plan, moves = other, neighbours(self._problem, moved)

    def stages(self, chain: Chain, ahead_per_cut: int = 0) -> tuple[Stage, ...]:
        problem = self._problem
        seconds = problem.profile.forward_seconds + problem.profile.backward_seconds
        if problem.recompute == "always":
            seconds = seconds + problem.profile.forward_seconds
        result = []
        for number, group in enumerate(chain.groups):
            first, end = chain.cuts[number : number + 2]
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

    def _plan(self, stages: tuple[Stage, ...]) -> PipelinePlan | None:
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


_HALVINGS = 10
_MOST_NAMED = 4


def least_short(problem: Problem) -> Chain:
    """Return the stages that need the least more memory on every device.

    The least addition is found by halving, up to 1/1000 of what the model takes on one device, for
    the first order of the devices and, of a model with many units, few cuts.
    """
    level = dataclasses.replace(problem, cuts=coarse_cuts(problem))
    profile, order = problem.profile, device_orders(problem.profile, problem.devices)[0]
    low, high = 0.0, stage_memory(profile, 0, profile.num_units, problem.micro_batches)
    chain = _first_that_fits(level, order, 2 * high)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        other = _first_that_fits(level, order, middle)
        if other.groups:
            chain, high = other, middle
        else:
            low = middle
    return chain


def explain_shortage(problem: Problem, chain: Chain) -> str:
    lacking = sorted(_lacking(problem, chain), key=lambda pair: -pair[1])
    parts = [
        f"{problem.devices.names[device]} lacks {readable_bytes(missing)} ({missing:.0f} bytes)"
        for device, missing in lacking[:_MOST_NAMED]
    ]
    if len(lacking) > _MOST_NAMED:
        parts.append(f"{len(lacking) - _MOST_NAMED} others lack less")
    advice = ["smaller micro-batches"]
    if problem.recompute == "never":
        advice.append('recompute="auto"')
    if problem.schedule == "gpipe":
        advice.append('schedule="1f1b"')
    return (
        "No plan fits into the memory of the devices. Received: "
        f"{problem.profile.num_units} units, {problem.devices.num_devices} devices; in the plan "
        f"that lacks least, {', '.join(parts) or 'no recomputation makes every replica fit'}. "
        f"Use {', '.join(advice)}, a smaller model or more devices."
    )


def _first_that_fits(problem: Problem, order: tuple[int, ...], more_bytes: float) -> Chain:
    devices = problem.devices
    larger = dataclasses.replace(devices, memory_bytes=devices.memory_bytes + more_bytes)
    program = LeastLatency(dataclasses.replace(problem, devices=larger), order)
    while True:
        _, chain = program.solve(np.inf, np.inf)
        if not chain.groups or program.exact(chain):
            return chain


def _lacking(problem: Problem, chain: Chain) -> list[tuple[int, float]]:
    """Return what the plan lacks with as much recomputation as it may use."""
    stages = Candidates(problem).stages(chain)
    result = []
    for number, stage in enumerate(stages):
        first, end = stage.first, stage.end
        every = tuple(range(first, end))
        ways = {"auto": ((), every), "never": ((),), "always": (every,)}[problem.recompute]
        for replica, device in enumerate(stage.devices):
            held = in_flight(stages, number, replica, problem.schedule)
            needed = min(stage_memory(problem.profile, first, end, held, way) for way in ways)
            limit = float(problem.devices.memory_bytes[device])
            if not fits(needed, limit):
                result.append((device, needed - limit))
    return result
