"""How fast each device is: its time for n samples, and its scores against others and itself."""

from __future__ import annotations

import dataclasses

import numpy as np

from keras_het.planning.balance.min_max import min_max_shares_linear
from keras_het.planning.diagnosis.recording import Floats, Recording
from keras_het.planning.diagnosis.steps import (
    Steps,
    Windows,
    checked,
    choose_windows,
    levels,
    medians,
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
