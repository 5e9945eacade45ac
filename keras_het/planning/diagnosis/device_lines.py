"""How long each device computes, as a line over its share."""

from __future__ import annotations

import dataclasses

import numpy as np

from keras_het.planning.balance.min_max import min_max_shares_linear
from keras_het.planning.diagnosis.recording import Floats, Recording
from keras_het.planning.diagnosis.statistics import checked, levels, medians
from keras_het.planning.diagnosis.steps import Steps
from keras_het.planning.shares import IntArray
from keras_het.planning.time_model_fit import MIN_SPREAD, Measurement, fit_line

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

    def known_seconds(self, shares: Floats | IntArray) -> Floats:
        """Return the same, with 0 for devices without samples and for unknown ones."""
        return np.where(shares > 0, np.nan_to_num(self.seconds(shares)), 0.0)

    def scaled(self, factors: Floats) -> DeviceLines:
        return DeviceLines(self.fixed * factors, self.slope * factors)

    def relative(self, compute: Floats, shares: Floats) -> Floats:
        """Return compute times as multiples of the lines; NaN without samples."""
        expected = self.seconds(shares)
        valid = (shares > 0) & (compute > 0) & (expected > 0)
        return np.where(valid, compute / np.where(valid, expected, 1.0), np.nan)

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
