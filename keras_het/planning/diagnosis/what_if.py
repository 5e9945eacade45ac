"""What steps would be without one device's, worker's or phase's troubles, or with other shares."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from keras_het.planning.diagnosis.recording import Floats
from keras_het.planning.diagnosis.situation import Situation
from keras_het.planning.shares import IntArray


@dataclasses.dataclass(frozen=True)
class WhatIf:
    """Mean time of a step in seconds, as it is and as it would be; NaN if there are no steps."""

    step_seconds: float
    by_device: Floats
    by_worker: Mapping[int, float]
    by_phase: Mapping[str, float]


PHASE_REPAIRS: Mapping[str, str] = {
    "compute": "all devices as fast as the fastest",
    "input": "no waiting for input",
    "sync": "no time for the transfer of gradients",
    "other": "least time for callbacks and Python",
}
"""What `WhatIf.by_phase` repairs, for people."""


def what_if(situation: Situation) -> WhatIf:
    """Compute recent steps again without one device's, worker's or phase's troubles."""
    # An ideal device computes its share as fast as the fastest would, waits for no input, and
    # spends as little other time as the one that spends least; where it is better, it keeps its own
    # time. An ideal transfer takes no time.
    steps = situation.recent
    compute, other = situation.ideal_compute, np.minimum(steps.other, steps.least_other)

    def seconds(own: Floats) -> float:
        return steps.mean(own.max(axis=1, initial=0.0) + steps.transfer)

    def without(devices: list[int]) -> float:
        own = steps.own.copy()
        own[:, devices] = (compute + other)[:, devices]
        return seconds(own)

    return WhatIf(
        steps.mean(steps.seconds),
        np.array([without([device]) for device in range(steps.own.shape[1])]),
        {worker: without(devices) for worker, devices in situation.devices_of.items()},
        {
            "compute": seconds(compute + steps.input + steps.other),
            "input": seconds(steps.compute + steps.other),
            "sync": steps.mean(steps.own.max(axis=1, initial=0.0)),
            "other": seconds(steps.compute + steps.input + other),
        },
    )


def gain_over_even(situation: Situation) -> float:
    """Return by what factor the present shares shorten steps over even ones; NaN if unknown."""
    seconds = seconds_with_shares(situation, np.ones(len(situation.shares)))
    return seconds / situation.step_seconds if situation.step_seconds > 0 else np.nan


def seconds_with_shares(situation: Situation, weights: Floats | IntArray) -> float:
    """Predict the mean time of the recent steps with shares in proportion to weights."""
    # A device's deviations from its line stay, so that both means have the same noise; so does each
    # step's global batch, which may grow.
    steps, lines = situation.recent, situation.lines
    shares = weights / max(weights.sum(), 1) * steps.shares.sum(axis=1, keepdims=True)
    line = lines.seconds(steps.shares)
    had_samples = (steps.shares > 0) & (line > 0)
    deviation = np.where(had_samples, steps.compute / np.where(had_samples, line, 1.0), 1.0)
    compute = np.where(shares > 0, np.nan_to_num(lines.seconds(shares) * deviation), 0.0)
    own = compute + steps.input + steps.other
    return steps.mean(own.max(axis=1, initial=0.0) + steps.transfer)
