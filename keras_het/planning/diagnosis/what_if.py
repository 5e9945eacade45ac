"""What each device, worker and phase costs: steps computed again with ideal times in its place."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from keras_het.planning.diagnosis.recording import Device, Floats, Recording
from keras_het.planning.diagnosis.scores import DeviceLines, device_lines
from keras_het.planning.diagnosis.steps import (
    Steps,
    comparable_rows,
    steps_of,
    without_long_rows,
)


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


def what_if(recording: Recording, steps: Steps | None = None) -> WhatIf:
    """Compute steps again without one device's, worker's or phase's troubles."""
    # An ideal device computes its share as fast as the fastest would, waits for no input, and
    # spends as little other time as the one that spends least; where it is better, it keeps its own
    # time. An ideal transfer takes no time.
    steps = _all_steps(recording) if steps is None else steps
    with np.errstate(all="ignore"):
        return _what_if(steps, device_lines(recording, steps), recording.devices)


def gain_over_even(recording: Recording, steps: Steps | None = None) -> float:
    """Return by what factor the present shares shorten steps over even ones; NaN if unknown."""
    steps = _all_steps(recording) if steps is None else steps
    if not len(steps.numbers):
        return np.nan
    with np.errstate(all="ignore"):
        lines = device_lines(recording, steps)
        even = steps.shares.sum(axis=1, keepdims=True) / max(len(recording.devices), 1)
        seconds = seconds_with_shares(steps, lines, np.broadcast_to(even, steps.shares.shape))
        present = steps.mean(steps.seconds)
        return seconds / present if present > 0 else np.nan


def _all_steps(recording: Recording) -> Steps:
    return without_long_rows(steps_of(recording, comparable_rows(recording)), begins=True)


def seconds_with_shares(steps: Steps, lines: DeviceLines, shares: Floats) -> float:
    """Predict the mean time of the same steps with other shares."""
    # A device's deviations from its line stay, so that both means have the same noise.
    line = lines.seconds(steps.shares)
    had_samples = (steps.shares > 0) & (line > 0)
    deviation = np.where(had_samples, steps.compute / np.where(had_samples, line, 1.0), 1.0)
    compute = np.where(shares > 0, np.nan_to_num(lines.seconds(shares) * deviation), 0.0)
    own = compute + steps.input + steps.other
    return steps.mean(own.max(axis=1, initial=0.0) + steps.transfer)


def _what_if(steps: Steps, lines: DeviceLines, devices: tuple[Device, ...]) -> WhatIf:
    fast, other = steps.compute, steps.other
    best = lines.fastest(steps.shares)
    if best is not None:
        fast = np.minimum(fast, lines.fixed[best] + lines.slope[best] * steps.shares)
    other = np.minimum(other, steps.least_other)
    ideal = fast + other
    workers = [device.worker for device in devices]

    def seconds(own: Floats) -> float:
        return steps.mean(own.max(axis=1, initial=0.0) + steps.transfer)

    phases = {
        "compute": seconds(fast + steps.input + steps.other),
        "input": seconds(steps.compute + steps.other),
        "sync": steps.mean(steps.own.max(axis=1, initial=0.0)),
        "other": seconds(steps.compute + steps.input + other),
    }
    groups = sorted(set(workers))
    by_worker = _without_each(
        steps, _largest_of(steps.own, workers), _largest_of(ideal, workers)
    ).tolist()
    return WhatIf(
        steps.mean(steps.seconds),
        _without_each(steps, steps.own, ideal),
        dict(zip(groups, by_worker, strict=True)),
        phases,
    )


def _largest_of(own: Floats, workers: list[int]) -> Floats:
    """Return the longest time among each worker's devices, of shape [T, number of workers]."""
    if not workers:
        return own
    order = np.argsort(workers, kind="stable")
    sorted_workers = np.asarray(workers)[order]
    begins = np.flatnonzero(np.r_[True, sorted_workers[1:] != sorted_workers[:-1]])
    return np.maximum.reduceat(own[:, order], begins, axis=1)


def _without_each(steps: Steps, own: Floats, ideal: Floats) -> Floats:
    """Return mean step times with ideal times in one column after the other."""
    columns = own.shape[1]
    if not own.size:
        return np.full(columns, np.nan)
    rows = np.arange(len(own))
    last = own.argmax(axis=1)
    longest = own[rows, last]
    others = own.copy()
    others[rows, last] = 0.0
    second = others.max(axis=1)
    # All but the last replica wait for it, whatever their own times.
    result = np.full(columns, float(steps.weights @ (longest + steps.transfer)))
    saved = longest - np.maximum(second, ideal[rows, last])
    result -= np.bincount(last, weights=steps.weights * saved, minlength=columns)
    return result / steps.weights.sum()
