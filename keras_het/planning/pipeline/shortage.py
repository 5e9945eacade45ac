"""Why no plan fits: the devices that would need the least additional memory, and how much."""

from __future__ import annotations

import dataclasses

import numpy as np

from keras_het.planning.pipeline.candidates import Candidates
from keras_het.planning.pipeline.device_orders import device_orders
from keras_het.planning.pipeline.group_costs import KnownCosts
from keras_het.planning.pipeline.least_latency import Chain, LeastLatency
from keras_het.planning.pipeline.plan import readable_bytes
from keras_het.planning.pipeline.problem import Problem
from keras_het.planning.pipeline.recomputation import fits, stage_memory
from keras_het.planning.pipeline.refinement import coarse_cuts
from keras_het.planning.pipeline.schedule import in_flight

_HALVINGS = 10
_MOST_NAMED = 4


def least_short(problem: Problem) -> tuple[Problem, Chain]:
    """Return the stages that need the least more memory on every device.

    The least addition is found by halving, up to 1/1000 of what the model takes on one device, for
    the first order of the devices and, of a model with many units, few cuts.
    """
    level = dataclasses.replace(problem, cuts=coarse_cuts(problem))
    profile = problem.profile
    low, high = 0.0, stage_memory(profile, 0, profile.num_units, problem.micro_batches)
    chain = _first_that_fits(level, 2 * high)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if other := _first_that_fits(level, middle):
            chain, high = other, middle
        else:
            low = middle
    return level, chain


def explain_shortage(problem: Problem, chain: Chain) -> str:
    """Return the message that even these stages do not fit."""
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


def _first_that_fits(problem: Problem, more_bytes: float) -> Chain:
    devices = problem.devices
    larger = dataclasses.replace(devices, memory_bytes=devices.memory_bytes + more_bytes)
    larger_problem = dataclasses.replace(problem, devices=larger)
    order = device_orders(problem.profile, devices, 1)[0]
    program = LeastLatency(larger_problem, order, KnownCosts(larger_problem))
    while True:
        _, chain = program.solve(np.inf, np.inf)
        if not chain or program.exact(chain):
            return chain


def _lacking(problem: Problem, chain: Chain) -> list[tuple[int, float]]:
    """Return what the plan lacks with as much recomputation as it may use."""
    profile, devices = problem.profile, problem.devices
    candidates = Candidates(problem)
    stages = candidates.stages(chain)
    result = []
    for number, stage in enumerate(stages):
        every = tuple(range(stage.first, stage.end))
        for replica, device in enumerate(stage.devices):
            held = in_flight(stages, number, replica, problem.schedule)
            ways = {"auto": ((), every), "never": ((),), "always": (every,)}[problem.recompute]
            needed = min(
                stage_memory(profile, stage.first, stage.end, held, units) for units in ways
            )
            if not fits(needed, float(devices.memory_bytes[device])):
                result.append((device, needed - float(devices.memory_bytes[device])))
    return result
