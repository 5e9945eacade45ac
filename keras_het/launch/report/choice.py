"""Which of the trainings below a directory a report is about, and what to say if there is none."""

from __future__ import annotations

import os

import tensorflow as tf

from keras_het.launch.report.plain_text import count, plain
from keras_het.telemetry.event_files import READ_ERRORS, Run, read_run, runs_below
from keras_het.tensorboard.log_content import NoSetupError
from keras_het.tensorboard.log_format import DIRECTORY

_MOST_NAMES = 8


def choose_run(log_dir: str, name: str | None) -> tuple[Run, list[str]]:
    """Return a training, by default the one written last, and the names of the others."""
    try:
        runs = runs_below(log_dir)
        if not runs:
            raise ValueError(_nothing_there(log_dir))
        chosen = max(runs, key=lambda each: _written(runs[each]))
        if name is not None:
            names = [os.path.normpath(name), os.path.normpath(f"{name}/{DIRECTORY}")]
            chosen = next((each for each in names if each in runs), "")
            if not chosen:
                raise ValueError(
                    f"There is no training {name!r} in this log. There is: {listed([*runs])}."
                )
        others = [each for each in runs if each != chosen]
        return Run(chosen, read_run(runs[chosen])), others
    except NoSetupError as error:
        more = f" Choose another with --run NAME: {listed(others)}." if others else ""
        raise ValueError(f"The log in {chosen} cannot be read: {error}{more}") from error
    except tf.errors.OpError as error:
        raise OSError(f"{log_dir!r} cannot be read: {error.message}") from error


def listed(names: list[str]) -> str:
    shown = ", ".join(plain(each) for each in names[:_MOST_NAMES])
    more = len(names) - _MOST_NAMES
    return f"{shown} and {more} more" if more > 0 else shown


def _written(paths: list[str]) -> int:
    try:
        return max(tf.io.gfile.stat(path).mtime_nsec for path in paths)
    except READ_ERRORS:  # removed meanwhile
        return 0


def _nothing_there(log_dir: str) -> str:
    files = [name for _, _, names in tf.io.gfile.walk(log_dir) for name in names]
    others = count(sum("tfevents" in name for name in files), "event file")
    return (
        f"There is no log of keras_het below {log_dir!r}; {others} there of other writers. A "
        f"training writes one with keras_het.callbacks.Telemetry({log_dir!r}) among the callbacks "
        "of model.fit, on all workers."
    )
