"""The division of a host's reading threads, in a file beside that of its jobs."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path

from keras_het.loader.host_jobs import Entry
from keras_het.planning.loader import Reading, ReadingCeiling

logger = logging.getLogger("keras_het")

_LONGEST_AGE_SECONDS = 15.0
_LONGEST_AGE_IN_WINDOWS = 4.0
_OTHER_STEPS_OF_A_MOVE = 32
"""Of the buffer, and of the window after it."""
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
        logger.debug("The clock has gone back: %s is begun anew.", path)
        ceiling = ReadingCeiling(ceiling.number + 1)
    ceiling.update(name, readings, now, min(given, default=None))
    # a process that is killed here leaves the old file or the new one
    new = path.with_suffix(".new")
    new.write_text(json.dumps(ceiling.to_dict()))
    new.replace(path)
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
    try:
        return ReadingCeiling.from_dict(json.loads(path.read_text()))
    except FileNotFoundError:
        return ReadingCeiling()
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        logger.debug("%s is begun anew: %r", path, error)
        return ReadingCeiling()
