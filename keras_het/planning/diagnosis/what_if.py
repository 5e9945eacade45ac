"""How fast each device is, and what it, its worker and each phase cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from keras_het.planning.balance.min_max import min_max_shares_linear
from keras_het.planning.diagnosis.recording import Device, Floats, Recording
from keras_het.planning.diagnosis.steps import (
    Steps,
    Windows,
    checked,
    choose_windows,
    comparable_rows,
    levels,
    medians,
    steps_of,
    without_long_rows,
)
from keras_het.planning.shares import IntArray
from keras_het.planning.time_model_fit import MIN_SPREAD, Measurement, fit_line

WINDOW = 64
"""Recent rows that a diagnosis looks at, unless told otherwise."""
_LEAST_BLOCK = 16
_BLOCKS = 50
# Changes of shares that are looked at, the latest ones, and rows on each side. Rows far from the
# change would mix in what else has happened, such as the fault that the change answers.
_CHANGES = 6
_ROWS_AROUND = 8
_LEAST_ROWS = 4
_NOISE = 0.05


@dataclasses.dataclass(frozen=True)
class DeviceLines:
    r"""Compute times :math:`t_d(n) = fixed_d + slope_d \cdot n`; NaN where unknown."""

    fixed: Floats
    slope: Floats

    def seconds(self, shares: Floats | IntArray | float) -> Floats:
        return np.asarray(self.fixed + self.slope * shares)

    def scaled(self, factors: Floats) -> DeviceLines:
        return DeviceLines(self.fixed * factors, self.slope * factors)

    def relative(self, compute: Floats, shares: Floats) -> Floats:
        """Return compute times as multiples of the lines; NaN without samples."""
        expected = self.seconds(shares)
        valid = (shares > 0) & (compute > 0) & (expected > 0)
        return np.where(valid, compute / np.where(valid, expected, 1.0), np.nan)

    def fastest(self, shares: Floats) -> int | None:
        """Return the device with the shortest time for a mean share; None if no line is known."""
        if not shares.size:
            return None
        seconds = self.seconds(float(shares.mean()))
        return None if np.isnan(seconds).all() else int(np.nanargmin(seconds))

    def balanced(self, shares: Floats) -> IntArray:
        """Return the shares with the shortest step; unknown devices keep theirs."""
        present = np.round(shares).astype(np.int64)
        known = np.isfinite(self.fixed) & np.isfinite(self.slope)
        if not known.any():
            return present
        total = max(round(float(shares.sum())), int(present[~known].sum()))
        return min_max_shares_linear(
            np.nan_to_num(self.fixed),
            np.nan_to_num(self.slope),
            total,
            np.where(known, 0, present),
            np.where(known, total, present),
        )


def scores(recording: Recording, window: int = WINDOW) -> tuple[Floats, Floats]:
    """Return how fast each device is, compared with the fastest device and with itself."""
    # Both are 1 at most, and NaN where nothing is known: of a device without samples, of a
    # recording without 16 steps before the recent ones, and in a pipeline, whose devices have
    # different layers.
    with np.errstate(all="ignore"):
        windows = choose_windows(recording, window)
        lines = device_lines(recording, windows.recent)
        best = against_best(lines, windows.recent)
        if recording.pipeline is not None:
            best = np.full_like(best, np.nan)
        return best, against_own_best(lines, windows)


def against_best(lines: DeviceLines, recent: Steps) -> Floats:
    if not recent.shares.size:
        return np.full(len(lines.fixed), np.nan)
    seconds = lines.seconds(float(recent.shares.mean()))
    valid = seconds > 0
    best = seconds[valid].min(initial=np.inf)
    return np.where(valid, best / np.where(valid, seconds, 1.0), np.nan)


def against_own_best(lines: DeviceLines, windows: Windows) -> Floats:
    recent, earlier = (
        lines.relative(steps.compute, steps.shares) for steps in (windows.recent, windows.earlier)
    )
    now = medians(recent)
    return np.where(now > 0, np.minimum(best_block(earlier) / now, 1.0), np.nan)


def best_block(values: Floats) -> Floats:
    """Return the smallest median of a block in each column; NaN with too few rows."""
    consecutive = blocks(values)
    unknown = np.isnan(consecutive).sum(axis=1) > consecutive.shape[1] // 2
    of_blocks = np.where(unknown, np.inf, medians(consecutive, axis=1))
    best = of_blocks.min(axis=0, initial=np.inf)
    return np.where(np.isinf(best), np.nan, best)


def blocks(values: Floats) -> Floats:
    """Cut rows into blocks of 2 % of them and at least 16, the latest rows first of all."""
    # Medians over more would hide what was good only in the beginning; of fewer the smallest is
    # chance.
    size = max(_LEAST_BLOCK, len(values) // _BLOCKS)
    number = len(values) // size
    # The first steps, which compile, are in no block if there is a choice.
    latest = values[len(values) - number * size :]
    return latest.reshape(number, size, *values.shape[1:])


def device_lines(recording: Recording, steps: Steps) -> DeviceLines:
    """Fit a line for each device; one without samples keeps the speed that it had last."""
    form = _lines_through_changes(recording)
    ratio = levels(form.relative(steps.compute, steps.shares))
    ratio[~steps.known] = np.nan
    for device in np.flatnonzero(np.isnan(ratio)).tolist():
        shares = np.asarray(recording.shares[:, device], np.float64)
        compute = checked(recording.compute[:, device])
        rows = np.flatnonzero((shares > 0) & (compute > 0) & np.isfinite(shares))[-_ROWS_AROUND:]
        line = form.fixed[device] + form.slope[device] * shares[rows]
        ratio[device] = float(medians(compute[rows] / line))
    return form.scaled(ratio)


def _lines_through_changes(recording: Recording) -> DeviceLines:
    """Return lines whose fixed part is right in proportion to the slope."""
    # Where shares have changed, times just before and after tell it; else it is taken to be 0.
    n = len(recording.devices)
    fixed, slope = np.zeros(n), np.ones(n)
    shares = np.nan_to_num(np.asarray(recording.shares, np.float64))
    changes = np.flatnonzero((shares[1:] != shares[:-1]).any(axis=1)) + 1
    edges = np.concatenate([[0], changes, [len(shares)]])
    lengths = np.diff(edges)
    lasting = np.flatnonzero((lengths[:-1] >= _LEAST_ROWS) & (lengths[1:] > _LEAST_ROWS))
    for index in lasting[-_CHANGES:]:
        begin, change, end = edges[index : index + 3]
        before = np.arange(max(begin, change - _ROWS_AROUND), change)
        # The first step with new shares may trace again.
        after = np.arange(change + 1, min(end, change + 1 + _ROWS_AROUND))
        first, second = shares[before[0]], shares[after[0]]
        earlier, later = (medians(checked(recording.compute[rows])) for rows in (before, after))
        lower, higher = np.minimum(first, second), np.maximum(first, second)
        usable = (lower >= 1) & (higher >= MIN_SPREAD * lower) & (earlier > 0) & (later > 0)
        for device in np.flatnonzero(usable):
            points = [
                Measurement(int(first[device]), float(earlier[device]), len(before)),
                Measurement(int(second[device]), float(later[device]), len(after)),
            ]
            # A device that has become faster or slower by a factor keeps the form of its line.
            known = fixed[device] / (fixed[device] + slope[device] * second[device])
            fixed[device], slope[device], _ = fit_line(points, known * later[device], _NOISE)
    return DeviceLines(fixed, slope)


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
