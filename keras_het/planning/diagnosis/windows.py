"""The recent steps that a diagnosis is about, and the earlier ones that it compares them with."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from keras_het.planning.diagnosis.middles import medians
from keras_het.planning.diagnosis.recording import Floats, Integers, Recording
from keras_het.planning.diagnosis.steps import (
    Steps,
    comparable_rows,
    steps_of,
    without_long_rows,
)

MIN_STEPS = 20
"""Steps below which nothing is said."""
# A share that changes by this fraction of an even share is a change; less is rounding.
_CHANGED_SHARE = 0.2
# With more changes than this within the window, shares follow each step and say nothing about it.
_FREQUENT_CHANGES = 3
# More rows of history would cost time and tell the same.
_MOST_EARLIER_ROWS = 1000
# A change of the step time must be this certain and this large, and last for so many steps.
_DEVIATIONS = 4.5
_CHANGED_SECONDS = 1.08
_LASTING_STEPS = 16
_LEAST_NOISE = 0.005
_MOST_NOISE = 5.0
_NORMAL_QUARTILE = 0.6745


@dataclasses.dataclass(frozen=True)
class Windows:
    """Recent and earlier steps."""

    recent: Steps
    earlier: Steps
    wanted: int
    since_shares: int | None = None
    since_speed: int | None = None


def choose_windows(recording: Recording, window: int) -> Windows:
    """Choose the steps of a diagnosis.

    Recent steps begin with the last change of shares, and with the last lasting change of the step
    time: what has ended is not reported, and what has begun is not averaged with what was before.
    """
    rows = comparable_rows(recording)
    tail = rows[-window:]
    steps = steps_of(recording, tail)
    begins = len(tail) == len(rows)
    changes = _share_changes(steps.shares)
    since_shares = None
    if 0 < len(changes) <= _FREQUENT_CHANGES:
        steps, begins = steps.rows(slice(int(changes[-1]), None)), False
        since_shares = int(steps.numbers[0])
    steps = without_long_rows(steps, begins)
    wanted = len(steps.numbers)
    first = last_change(steps.seconds)
    since_speed = int(steps.numbers[first]) if first else None
    recent = steps.rows(slice(first, None))
    begin = recent.numbers[0] if len(recent.numbers) else 0
    before = rows[recording.steps[rows] < begin]
    stride = max(-(-len(before) // _MOST_EARLIER_ROWS), 1)
    earlier = steps_of(recording, before[::-stride][::-1])
    return Windows(recent, earlier, wanted, since_shares, since_speed)


def last_change(seconds: Floats) -> int:
    """Return the index at which a series has last changed its level for good; 0 if it has not.

    Of all places, the one with the largest difference of means before and after, in standard
    deviations, is a change if this exceeds what noise does. What comes after it is searched again.
    """
    first = 0
    while len(seconds) - first >= 2 * _LASTING_STEPS:
        change = _change(np.log(np.maximum(seconds[first:], 1e-9)))
        if not change:
            break
        first += change
    return first


def _change(logs: Floats) -> int:
    middle = float(medians(logs))
    n = len(logs)
    after = np.arange(n - _LASTING_STEPS // 2, _LASTING_STEPS - 1, -1)
    before = n - after

    def difference(most: float) -> Floats:
        sums = np.cumsum(np.clip(logs, middle - most, middle + most))
        result: Floats = (sums[-1] - sums[before - 1]) / after - sums[before - 1] / before
        return result

    steps_between = np.abs(np.diff(logs))
    noise = max(float(medians(steps_between)) / (_NORMAL_QUARTILE * math.sqrt(2)), _LEAST_NOISE)
    # A stall counts as little more than noise, or two of them would be a lasting change.
    certain = np.abs(difference(_MOST_NOISE * noise))
    deviations = certain / (noise * np.sqrt(1.0 / after + 1.0 / before))
    best = int(deviations.argmax())
    large = abs(difference(1.0)[best]) > math.log(_CHANGED_SECONDS)
    return int(before[best]) if large and deviations[best] > _DEVIATIONS else 0


def _share_changes(shares: Floats) -> Integers:
    """Return the rows whose shares differ from those before, other than by the total."""
    total = np.maximum(shares.sum(axis=1, keepdims=True), 1e-9)
    fractions = shares / total * shares.shape[1]
    differs = np.abs(np.diff(fractions, axis=0)).max(axis=1, initial=0.0) > _CHANGED_SHARE
    return np.flatnonzero(differs) + 1
