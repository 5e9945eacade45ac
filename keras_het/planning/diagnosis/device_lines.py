"""How long each device takes for how many samples: a straight line for each."""

from __future__ import annotations

import dataclasses

import numpy as np

from keras_het.planning.balance.min_max import min_max_shares_linear
from keras_het.planning.bounded_shares import IntArray
from keras_het.planning.diagnosis.middles import checked, levels, medians
from keras_het.planning.diagnosis.recording import Floats, Integers, Recording
from keras_het.planning.diagnosis.steps import Steps
from keras_het.planning.times.line_fit import MIN_SPREAD, Measurement, fit_line

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
        """Return times of shares."""
        return np.asarray(self.fixed + self.slope * shares)

    def scaled(self, factors: Floats) -> DeviceLines:
        """Return lines of devices that are slower by a factor."""
        return DeviceLines(self.fixed * factors, self.slope * factors)

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


def device_lines(recording: Recording, steps: Steps) -> DeviceLines:
    """Fit a line for each device that passes through its times in some steps.

    Where shares have changed, times just before and after tell the fixed cost of a step; else it
    is taken to be 0. The line is then scaled to the present speed. A device that has no samples
    now keeps the speed that it had when it last had some.
    """
    shape = _shapes(recording)
    ratio = levels(_relative(shape, steps.compute, steps.shares))
    ratio[~steps.known] = np.nan
    for device in np.flatnonzero(np.isnan(ratio)).tolist():
        ratio[device] = _last_ratio(recording, shape, device)
    return shape.scaled(ratio)


def relative_times(lines: DeviceLines, steps: Steps) -> Floats:
    """Return compute times as multiples of the lines; NaN without samples."""
    return _relative(lines, steps.compute, steps.shares)


def _relative(lines: DeviceLines, compute: Floats, shares: Floats) -> Floats:
    expected = lines.seconds(shares)
    valid = (shares > 0) & (compute > 0) & (expected > 0)
    result: Floats = np.where(valid, compute / np.where(valid, expected, 1.0), np.nan)
    return result


def _last_ratio(recording: Recording, shape: DeviceLines, device: int) -> float:
    shares = np.asarray(recording.shares[:, device], np.float64)
    compute = checked(recording.compute[:, device])
    rows = np.flatnonzero((shares > 0) & (compute > 0) & np.isfinite(shares))[-_ROWS_AROUND:]
    line = shape.fixed[device] + shape.slope[device] * shares[rows]
    return float(medians(compute[rows] / line))


def _shapes(recording: Recording) -> DeviceLines:
    """Return lines whose fixed part is right in proportion to the slope."""
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
        _fit_change(recording, shares, before, after, fixed, slope)
    return DeviceLines(fixed, slope)


def _fit_change(
    recording: Recording,
    shares: Floats,
    before: Integers,
    after: Integers,
    fixed: Floats,
    slope: Floats,
) -> None:
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
