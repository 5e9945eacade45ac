"""The plan of a pipeline: which units run where, or that it is better not to cut the model."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from keras_het.planning.pipeline.candidates import Candidates
from keras_het.planning.pipeline.devices import Devices
from keras_het.planning.pipeline.model_profile import ModelProfile
from keras_het.planning.pipeline.plan import PipelinePlan
from keras_het.planning.pipeline.problem import Problem
from keras_het.planning.pipeline.recomputation import check_recompute
from keras_het.planning.pipeline.refinement import find_chains
from keras_het.planning.pipeline.schedule import check_micro_batches, check_schedule
from keras_het.planning.pipeline.shortage import explain_shortage, least_short

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
    problem = _checked(Problem(profile, devices, micro_batches, schedule, recompute, cuts))
    return _plan(problem, tolerance)


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
    return _plan(_checked(problem), tolerance)


def _checked(problem: Problem) -> Problem:
    check_micro_batches(problem.micro_batches)
    check_schedule(problem.schedule)
    check_recompute(problem.recompute)
    if problem.profile.num_devices != problem.devices.num_devices:
        raise ValueError(
            "The profile must have a column for each device. Received: "
            f"{problem.profile.num_devices} columns, {problem.devices.num_devices} devices. "
            "Measure every unit on every device."
        )
    return problem


def _plan(problem: Problem, tolerance: float) -> PipelinePlan:
    candidates = Candidates(problem)
    chains = find_chains(problem, tolerance)
    plans = _SIMULATED_PASSES / (problem.micro_batches * len(chains[0])) if chains else 0
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
