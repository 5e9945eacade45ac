"""The plan of a pipeline: which units run where, or that it is better not to cut the model."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from keras_het.planning.pipeline.least_time import Value
from keras_het.planning.pipeline.plan import PipelinePlan, Stage, in_flight, readable_bytes
from keras_het.planning.pipeline.problem import Chain, Devices, ModelProfile, Problem
from keras_het.planning.pipeline.recomputation import fits, stage_memory
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
        """Return the plan of the shortest step found, or None if none fits."""
        # The chains of the least bounds are simulated, then neighbours of the fastest ones.
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


def plan_pipeline(
    profile: ModelProfile,
    devices: Devices,
    num_micro_batches: int,
    schedule: str = "1f1b",
    recompute: str = "auto",
) -> PipelinePlan:
    """Choose stages, their devices and what they recompute, so that a step is short.

    Every stage has neighbouring units and one or several devices (replicas, which take whole
    micro-batches by their speed). One stage on several devices is data parallelism, one stage on
    one device no parallelism at all; slow devices may stay unused. Stages in proportion to speed
    and memory, for several orders of the devices, are changed step by step while a lower bound of
    their time falls. Those of the least bounds are simulated together with data parallelism and
    each device alone, and the fastest plan is the result. The same numbers give the same plan.

    Args:
        profile: costs of the model.
        devices: devices and links; as many as the profile has.
        num_micro_batches: micro-batches of a step, M.
        schedule: "1f1b", or "gpipe" (all forward passes first; needs more memory).
        recompute: "auto" recomputes the cheapest units that make a stage fit, "never" none,
            "always" all.

    Raises:
        ValueError: if an argument is not valid, or no plan fits into memory; the message says which
            device lacks how many bytes.

    References:
        Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019
        (stages with replicas, planned from a profile).
        Zhan and Zhang, "Pipe-Torch: Pipeline-Based Distributed Deep Learning in a GPU Cluster with
        Heterogeneous Networking", CBD 2019 (unequal links, recomputation inside).
    """
    cuts = profile.allowed_cuts()
    return _plan(Problem(profile, devices, num_micro_batches, schedule, recompute, cuts))


def plan_with_cuts(
    profile: ModelProfile,
    devices: Devices,
    cuts: Sequence[int],
    num_micro_batches: int,
    schedule: str = "1f1b",
    recompute: str = "auto",
) -> PipelinePlan:
    """Choose the devices of stages whose cuts are given.

    Args:
        profile: costs of the model.
        devices: devices and links; as many as the profile has.
        cuts: the first unit of each stage but the first one, rising.
        num_micro_batches: micro-batches of a step, M.
        schedule: as in `plan_pipeline`.
        recompute: as in `plan_pipeline`.

    Raises:
        ValueError: if a cut is not valid, there are more stages than devices, or no plan fits.
    """
    allowed = profile.allowed_cuts()
    chosen = (0, *cuts, profile.num_units)
    if any(before >= after for before, after in itertools.pairwise(chosen)):
        raise ValueError(
            f"Cuts must increase, from 1 to {profile.num_units - 1}. Received: {list(cuts)}. "
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
            f"Every stage needs its own device. Received: {len(chosen) - 1} stages, "
            f"{devices.num_devices} devices. Leave out cuts."
        )
    problem = Problem(
        profile, devices, num_micro_batches, schedule, recompute, chosen, all_cuts=True
    )
    return _plan(problem)


def _plan(problem: Problem) -> PipelinePlan:
    search = Search(problem)
    search.run()
    candidates = Candidates(search)
    alternatives = () if problem.all_cuts else _without_pipeline(candidates)
    best = candidates.improve()
    if best is None:
        chain = min(search.known, key=lambda chain: (search.known[chain], chain))
        raise ValueError(explain_shortage(candidates, chain))
    return dataclasses.replace(best, alternatives=alternatives)


def _without_pipeline(candidates: Candidates) -> tuple[tuple[str, float], ...]:
    """Return the times of data parallelism on all devices, and of the best device alone."""
    everyone = range(candidates.problem.devices.num_devices)
    alone = "one device", min(candidates.one_stage([device]) for device in everyone)
    if len(everyone) == 1:
        return (alone,)
    return ("data parallelism on all devices", candidates.one_stage(everyone)), alone


_MOST_NAMED = 4


def explain_shortage(candidates: Candidates, chain: Chain) -> str:
    problem = candidates.problem
    lacking = sorted(_lacking(candidates, chain), key=lambda pair: -pair[1])
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


def _lacking(candidates: Candidates, chain: Chain) -> list[tuple[int, float]]:
    """Return what the plan lacks with as much recomputation as it may use."""
    problem, stages, result = candidates.problem, candidates.stages(chain), []
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
