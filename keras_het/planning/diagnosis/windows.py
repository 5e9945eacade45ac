"""The recent steps that a diagnosis is about, and the earlier ones to compare them with."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from keras_het.planning.diagnosis.recording import Floats, Integers, Recording
from keras_het.planning.diagnosis.statistics import medians
from keras_het.planning.diagnosis.steps import Steps, comparable_rows, steps_of

WINDOW = 64
"""Recent rows that a diagnosis looks at."""
MIN_STEPS = 20
"""Steps below which nothing is said."""
# The first steps of a run trace and compile.
_FIRST_ROWS = 8
_LONG_FIRST_ROW = 2.5
# An evaluation, a checkpoint or a new trace between steps.
_LONG_ROW = 4.0
_MOST_LONG_ROWS = 0.05
# What happened once proves nothing: a stall of the machine.
_SINGLE_ROW = 1.5
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
    """Recent and earlier steps; `wanted` are those since the last change of shares."""

    recent: Steps
    earlier: Steps
    wanted: int
    since_shares: int | None = None
    since_speed: int | None = None


def choose_windows(recording: Recording) -> Windows:
    """Choose the recent and the earlier steps of a diagnosis."""
    # Recent steps begin with the last change of shares, and with the last lasting change of the
    # step time: what has ended is not reported, what has begun is not averaged with what was
    # before.
    rows = comparable_rows(recording)
    tail = rows[-WINDOW:]
    steps = steps_of(recording, tail)
    begins = len(tail) == len(rows)
    changes = _share_changes(steps.shares)
    since_shares = None
    if 0 < len(changes) <= _FREQUENT_CHANGES:
        steps, begins = steps.rows(slice(int(changes[-1]), None)), False
        since_shares = int(steps.numbers[0])
    steps = _without_long_rows(steps, begins)
    wanted = len(steps.numbers)
    first = _last_change(steps.seconds)
    since_speed = int(steps.numbers[first]) if first else None
    recent = steps.rows(slice(first, None))
    begin = recent.numbers[0] if len(recent.numbers) else 0
    before = rows[recording.steps[rows] < begin]
    stride = max(-(-len(before) // _MOST_EARLIER_ROWS), 1)
    earlier = steps_of(recording, before[::-stride][::-1])
    return Windows(recent, earlier, wanted, since_shares, since_speed)


def _last_change(seconds: Floats) -> int:
    """Return the index at which a series has last changed its level for good; 0 if it has not."""
    first = 0
    while len(seconds) - first >= 2 * _LASTING_STEPS:
        change = _change(np.log(np.maximum(seconds[first:], 1e-9)))
        if not change:
            break
        first += change
    return first


def _change(logs: Floats) -> int:
    """Return the place with the largest difference of means before and after, 0 if it is noise."""
    middle = float(medians(logs))
    n = len(logs)
    after = np.arange(n - _LASTING_STEPS // 2, _LASTING_STEPS - 1, -1)
    before = n - after

    def difference(most: float) -> Floats:
        sums = np.cumsum(np.clip(logs, middle - most, middle + most))
        return (sums[-1] - sums[before - 1]) / after - sums[before - 1] / before

    steps_between = np.abs(np.diff(logs))
    noise = max(float(medians(steps_between)) / (_NORMAL_QUARTILE * math.sqrt(2)), _LEAST_NOISE)
    # A stall counts as little more than noise, or two of them would be a lasting change.
    certain = np.abs(difference(_MOST_NOISE * noise))
    deviations = certain / (noise * np.sqrt(1.0 / after + 1.0 / before))
    best = int(deviations.argmax())
    large = abs(difference(1.0)[best]) > math.log(_CHANGED_SECONDS)
    return int(before[best]) if large and deviations[best] > _DEVIATIONS else 0


def _share_changes(shares: Floats) -> Integers:
    """Rows whose shares differ from those before, other than by the total."""
    total = np.maximum(shares.sum(axis=1, keepdims=True), 1e-9)
    fractions = shares / total * shares.shape[1]
    differs = np.abs(np.diff(fractions, axis=0)).max(axis=1, initial=0.0) > _CHANGED_SHARE
    return np.flatnonzero(differs) + 1


def _without_long_rows(steps: Steps, begins: bool) -> Steps:
    """Leave out first steps that compile, a few that are far longer, and one that stands alone."""
    if len(steps.numbers) < 3:
        return steps
    middle = float(medians(steps.seconds))
    first = 0
    while begins and first < _FIRST_ROWS and steps.seconds[first] > _LONG_FIRST_ROW * middle:
        first += 1
        if first == len(steps.numbers):
            return steps
    kept = steps.rows(slice(first, None))
    is_long = kept.seconds > _LONG_ROW * middle
    second, longest = np.sort(kept.seconds)[-2:] if len(kept.seconds) > 1 else (0.0, 0.0)
    if longest > _SINGLE_ROW * second:
        is_long[kept.seconds.argmax()] = True
    if 0 < is_long.sum() <= max(2, _MOST_LONG_ROWS * len(is_long)) < len(is_long):
        kept = kept.rows(np.flatnonzero(~is_long))
    return kept
