"""The plan of a pipeline: which units run where, or that it is better not to cut the model."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from keras_het.planning.pipeline.candidates import Candidates
from keras_het.planning.pipeline.least_latency import Chain, LeastLatency
from keras_het.planning.pipeline.plan import PipelinePlan, in_flight, readable_bytes
from keras_het.planning.pipeline.problem import Devices, ModelProfile, Problem
from keras_het.planning.pipeline.recomputation import fits, stage_memory
from keras_het.planning.pipeline.refinement import coarse_cuts, device_orders, find_chains

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
        level, chain = least_short(problem)
        best = Candidates(level).add(chain)
        if best is None:
            raise ValueError(explain_shortage(level, chain))
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


_HALVINGS = 10
_MOST_NAMED = 4


def least_short(problem: Problem) -> tuple[Problem, Chain]:
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
    return level, chain


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
