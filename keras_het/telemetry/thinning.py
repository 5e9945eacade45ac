"""Old steps thinned: an event file replaced by one that has a row for many steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf

from keras_het.telemetry.event_files import EventFile, read_events
from keras_het.tensorboard import log_format
from keras_het.tensorboard.columns import windows
from keras_het.tensorboard.log_content import Value, is_readable

_KEPT = (log_format.SETUP, log_format.PLAN, log_format.CHANGES, log_format.PAUSES)


def raw_steps_in(path: str) -> int:
    """Return how many steps an event file holds one by one."""
    return sum(len(each.value) for each in _readable(path) if each.tag == log_format.STEPS)


def thinned_file(path: str, every: int) -> None:
    """Replace an event file by a thinned one.

    Steps become rows of (lowest, median, highest), of other series the last value of each window
    stays; setups, plans and changes stay as they are. The new file is complete before it takes the
    place of the old one, whose name it has: a reader finds one of them, at the same position.
    """
    values = thinned(_readable(path), every)
    # Without "tfevents" in its name, so that no reader takes it for a part of the log.
    directory, slash, name = path.rpartition("/")
    unfinished = f"{directory}{slash}thinning.{name.removeprefix(log_format.FILE_PREFIX)}"
    file = EventFile(unfinished)
    try:
        for each in values:
            file.write([each])
        file.flush()
    finally:
        file.close()
    tf.io.gfile.rename(unfinished, path, overwrite=True)


def _readable(path: str) -> list[Value]:
    return [each for each in read_events(path) if is_readable(each)]


def thinned(values: Sequence[Value], every: int) -> list[Value]:
    """Return the values of a file with its steps thinned, in the order of time."""
    kept = list(_thinned_steps([each for each in values if each.tag == log_format.STEPS], every))
    last: dict[tuple[str, int], Value] = {}
    for each in values:
        if each.tag in _KEPT or _is_thinned(each.tag):
            kept.append(each)
        elif each.tag != log_format.STEPS:
            last[each.tag, each.step // every] = each
    return sorted([*kept, *last.values()], key=lambda each: each.time)


def _is_thinned(tag: str) -> bool:
    return log_format.steps_per_row(tag) > 1


def _thinned_steps(blocks: Sequence[Value], every: int) -> Iterator[Value]:
    """Values of thinned steps, one for each run of blocks without a gap."""
    start = 0
    for place, block in enumerate(blocks):
        following = blocks[place + 1] if place + 1 < len(blocks) else None
        if (
            following is None
            or following.step != block.step + len(block.value)
            or following.value.shape[1:] != block.value.shape[1:]
        ):
            first, rows = blocks[start], [each.value for each in blocks[start : place + 1]]
            yield Value(
                log_format.thinned_tag(every),
                first.step,
                first.time,
                windows(np.concatenate(rows), every),
            )
            start = place + 1
