"""Two scores of a device: against the fastest device, and against itself at its best."""

from __future__ import annotations

import numpy as np

from keras_het.planning.diagnosis.device_lines import (
    DeviceLines,
    device_lines,
    relative_times,
)
from keras_het.planning.diagnosis.middles import medians
from keras_het.planning.diagnosis.recording import Floats, Recording
from keras_het.planning.diagnosis.steps import Steps
from keras_het.planning.diagnosis.windows import Windows, choose_windows

WINDOW = 64
"""Recent rows that a diagnosis looks at, unless told otherwise."""
_LEAST_BLOCK = 16
_BLOCKS = 50


def scores(recording: Recording, window: int = WINDOW) -> tuple[Floats, Floats]:
    r"""Return how fast each device is, compared with the fastest device and with itself.

    With the times :math:`t_d(n)` of the same number of samples n, the mean share,

    .. math:: best_d = \frac{\min_e t_e(n)}{t_d(n)}, \qquad
        own_d = \frac{\text{median of its best block}}{\text{median of recent steps}}

    An old device has a low score against the best device and a high one against itself; a device
    that fails has a low one against itself. A block is 2 % of the steps and at least 16; times in
    it are relative to the line of the device, so that shares may differ. Both are 1 at most, and
    NaN where nothing is known: a device without samples has no speed, and a recording without 16
    steps before the recent ones has no best. In a pipeline devices have different layers: nothing
    is known of one against another.
    """
    with np.errstate(all="ignore"):
        windows = choose_windows(recording, window)
        lines = device_lines(recording, windows.recent)
        best = against_best(lines, windows.recent)
        if recording.pipeline is not None:
            best = np.full_like(best, np.nan)
        return best, against_own_best(lines, windows)


def against_best(lines: DeviceLines, recent: Steps) -> Floats:
    """Return the fastest device's time of a mean share over each device's, of shape [N]."""
    if not recent.shares.size:
        return np.full(len(lines.fixed), np.nan)
    seconds = lines.seconds(float(recent.shares.mean()))
    valid = seconds > 0
    best = seconds[valid].min(initial=np.inf)
    result: Floats = np.where(valid, best / np.where(valid, seconds, 1.0), np.nan)
    return result


def against_own_best(lines: DeviceLines, windows: Windows) -> Floats:
    """Return each device's best time relative to its line over the present one, of shape [N]."""
    now = medians(relative_times(lines, windows.recent))
    best = best_block(relative_times(lines, windows.earlier))
    result: Floats = np.where(now > 0, np.minimum(best / now, 1.0), np.nan)
    return result


def best_block(values: Floats) -> Floats:
    """Return the smallest median of consecutive rows in each column; NaN with too few rows.

    Medians over a longer time would hide what was good only in the beginning, over a shorter one
    the smallest would be an accident.
    """
    consecutive = blocks(values)
    unknown = np.isnan(consecutive).sum(axis=1) > consecutive.shape[1] // 2
    of_blocks = np.where(unknown, np.inf, medians(consecutive, axis=1))
    best = of_blocks.min(axis=0, initial=np.inf)
    result: Floats = np.where(np.isinf(best), np.nan, best)
    return result


def blocks(values: Floats) -> Floats:
    """Cut rows into blocks of 2 % of them and at least 16, the latest rows first of all."""
    size = max(_LEAST_BLOCK, len(values) // _BLOCKS)
    number = len(values) // size
    # The first steps, which compile, are in no block if there is a choice.
    latest = values[len(values) - number * size :]
    return latest.reshape(number, size, *values.shape[1:])
