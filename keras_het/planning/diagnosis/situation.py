"""What is known of recent steps, beside their times: speeds, bests, readings."""

from __future__ import annotations

import functools

import numpy as np

from keras_het.planning.diagnosis.middles import means, medians
from keras_het.planning.diagnosis.readings import Readings, host_states
from keras_het.planning.diagnosis.recording import Floats, Recording
from keras_het.planning.diagnosis.scores import (
    against_best,
    against_own_best,
    best_block,
    blocks,
    device_lines,
)
from keras_het.planning.diagnosis.steps import Windows

# A device is slow from this ratio on, and further by so many standard errors.
_SLOW = 1.15
_DEVIATIONS = 3.0
# Shares follow measured speeds if a step computes at most this many times as long as with the best
# ones, and differ from this ratio on.
_DEAD_BAND = 1.05
_OF_MEDIAN_DEVIATION = 1.4826


class Situation:
    """Everything that a diagnosis asks about, computed once."""

    def __init__(self, recording: Recording, windows: Windows) -> None:
        self.recording = recording
        self.windows = windows
        self.recent = windows.recent
        self.step_seconds = self.recent.mean(self.recent.seconds)
        self.lines = device_lines(recording, self.recent)
        self.shares = self.recent.shares.mean(axis=0)
        self.best = against_best(self.lines, self.recent)
        self.own_best = against_own_best(self.lines, windows)
        self.readings = Readings(recording, int(self.recent.numbers[0]))
        self.hosts = host_states(recording, self.readings)
        self.devices_of: dict[int, list[int]] = {worker: [] for worker in self.hosts}
        for index, device in enumerate(recording.devices):
            self.devices_of[device.worker].append(index)

    def changed(self, kind: str) -> bool:
        """Tell whether a training has changed something already."""
        return any(change.kind == kind for change in self.recording.changes)

    @functools.cached_property
    def limits(self) -> Floats:
        """Ratio from which on a device is slow, float64 of shape [N]."""
        times = self.lines.relative(self.recent.compute, self.recent.shares)
        deviation = _OF_MEDIAN_DEVIATION * medians(np.abs(times - medians(times)))
        error = np.nan_to_num(deviation) / np.sqrt(max(len(times), 1))
        result: Floats = _SLOW + _DEVIATIONS * error
        return result

    @functools.cached_property
    def common(self) -> float:
        """The best score against themselves of all devices: what all have lost is no device's."""
        if len(self.own_best) < 2 or np.isnan(self.own_best).all():
            return 1.0
        return float(np.nanmax(self.own_best))

    @functools.cached_property
    def least_other(self) -> float:
        """Other time in seconds that a replica must spend, as far as is known."""
        earlier = best_block(self.windows.earlier.other)
        values = means(self.recent.other)
        if len(values) > 1:
            earlier = np.append(earlier, values)
        known = earlier[~np.isnan(earlier)]
        return float(known.min()) if len(known) else float(values.max(initial=0.0))

    @functools.cached_property
    def least_transfer(self) -> float:
        """Transfer in seconds in the best earlier steps; infinite if unknown."""
        best = best_block(self.windows.earlier.transfer[:, None])[0]
        return float(best) if np.isfinite(best) else np.inf

    @functools.cached_property
    def usual_seconds(self) -> float:
        """Step time in seconds, with medians in place of single times: without noise."""
        return usual_seconds(self.recent.own[None], self.recent.transfer[None])

    @functools.cached_property
    def least_seconds(self) -> float:
        """Usual step time of the best earlier steps with as many samples; infinite if unknown."""
        earlier = self.windows.earlier
        total = earlier.shares.sum(axis=1)
        now = float(medians(self.recent.shares.sum(axis=1)))
        same = np.abs(total - now) <= 0.02 * now
        return usual_seconds(blocks(earlier.own[same]), blocks(earlier.transfer[same]))

    @functools.cached_property
    def share_seconds(self) -> Floats:
        """Compute time of each device's present share in seconds, float64 of shape [N]."""
        seconds = np.nan_to_num(self.lines.seconds(self.shares))
        return np.where(self.shares > 0, seconds, 0.0)

    @functools.cached_property
    def balanced_seconds(self) -> float:
        """Compute time of a step with balanced shares in seconds; NaN if no speed is known."""
        return self.balanced_seconds_with(np.ones(len(self.lines.fixed)))

    @functools.cached_property
    def unbalanced(self) -> float:
        """How many times as long as with balanced shares steps compute with the present ones."""
        best = self.balanced_seconds
        return float(self.share_seconds.max(initial=0.0)) / best if best > 0 else 1.0

    @property
    def is_balanced(self) -> bool:
        """Whether the present shares follow the measured speeds, up to a dead-band."""
        return self.unbalanced <= _DEAD_BAND

    @property
    def follows(self) -> bool:
        """Whether somebody balances: shares differ, and follow the measured speeds."""
        differs = np.abs(self.shares - self.shares.mean()) > (_DEAD_BAND - 1) * self.shares.mean()
        return self.is_balanced and bool(differs.any())

    def balanced_seconds_with(self, factors: Floats) -> float:
        """Return a step's compute time with balanced shares, if devices changed their speed."""
        lines = self.lines.scaled(factors)
        shares = lines.balanced(self.shares)
        seconds = np.where(shares > 0, np.nan_to_num(lines.seconds(shares)), 0.0)
        return float(seconds.max(initial=0.0))


def usual_seconds(own: Floats, transfer: Floats) -> float:
    """Return the shortest usual step of blocks: of medians over their rows."""
    seconds = medians(own, axis=1).max(axis=1, initial=0.0) + medians(transfer, axis=1)
    return float(seconds.min(initial=np.inf))
