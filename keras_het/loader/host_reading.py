"""The division of a host's reading threads, in a file beside that of its jobs."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keras_het.loader.host_files import ignore, read_json, write_json
from keras_het.loader.host_jobs import Entry
from keras_het.planning.loader import Reading, ReadingCeiling

logger = logging.getLogger("keras_het")

_LONGEST_AGE_SECONDS = 15.0
_LONGEST_AGE_IN_WINDOWS = 4.0
_OTHER_STEPS_OF_A_MOVE = 32
"""Of the buffer, and of the window after it."""
_LARGEST = 1e15
_OTHER_FORM = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What reading raises where another version, or somebody else, wrote the file."""
_CLOCK_SECONDS = 1.0
"""By as much the file may be ahead of the clock."""


def divide_reading(path: Path, name: str, jobs: Mapping[str, Entry], now: float) -> ReadingCeiling:
    """Takes the latest window of a job, and divides the reading threads; called under the lock.

    Args:
        path: file of what was learned.
        name: the job.
        jobs: all jobs of the host, by name.
        now: time, in seconds.

    Raises:
        OSError: if the file cannot be written.
    """
    readings = {
        each: entry.reading
        for each, entry in jobs.items()
        if entry.reading is not None and _is_fresh(entry.reading, now)
    }
    given = [entry.io_budget for entry in jobs.values() if entry.io_budget is not None]
    ceiling = _read(path)
    if ceiling.newest > now + _CLOCK_SECONDS:
        logger.debug("The clock has gone back: %s is begun again.", path)
        ceiling = ReadingCeiling(ceiling.number + 1)
    try:
        ceiling.update(name, readings, now, min(given, default=None))
    except _OTHER_FORM as error:
        ignore(path, error)
        ceiling = ReadingCeiling(ceiling.number + 1)
        ceiling.update(name, readings, now, min(given, default=None))
    write_json(path, ceiling.to_dict())
    return ceiling


def _is_fresh(reading: Reading, now: float) -> bool:
    """Whether the job still reads: it may validate for a while, or save.

    One that moves reads too, but has no window until its loaders' batches are used.
    """
    step = reading.seconds / reading.steps
    move = (2 * reading.loaders + _OTHER_STEPS_OF_A_MOVE) * step
    longest = max(_LONGEST_AGE_SECONDS, _LONGEST_AGE_IN_WINDOWS * reading.seconds, 1.5 * move)
    return now - reading.ended <= longest


def _read(path: Path) -> ReadingCeiling:
    values = read_json(path)
    if values is None:
        return ReadingCeiling()
    try:
        _check_numbers(values)
        return ReadingCeiling.from_dict(values)
    except _OTHER_FORM as error:
        ignore(path, error)
        return ReadingCeiling()


def _check_numbers(values: Any) -> None:
    """No number of a ceiling is below zero or infinite; a time that never was is -inf."""
    if isinstance(values, dict):
        values = list(values.values())
    if isinstance(values, list):
        for value in values:
            _check_numbers(value)
    elif isinstance(values, (int, float)) and not 0 <= values <= _LARGEST and values != -math.inf:
        raise ValueError(f"a number from 0 to {_LARGEST:g} was expected, received: {values}")
