"""Which of the trainings below a directory a report is about, and what to say if there is none."""

from __future__ import annotations

import os
from collections.abc import Mapping

import tensorflow as tf

from keras_het.launch.report.plain_text import check_log_dir, count, plain
from keras_het.telemetry.event_files import READ_ERRORS, Run, event_files, read_log
from keras_het.tensorboard.log_format import DIRECTORY

_MOST_NAMES = 8
_EVENT_FILE = "tfevents"


def choose_run(log_dir: str, name: str | None) -> tuple[Run, list[str], Mapping[str, str]]:
    """Return a training of a log, the names of others, and why some cannot be read, by name."""
    unreadable: dict[str, str] = {}
    try:
        check_log_dir(log_dir, tf.io.gfile.isdir, tf.io.gfile.exists)
        runs = {run.name: run for run in read_log(log_dir, unreadable)}
        if not runs:
            raise ValueError(_nothing_there(log_dir, unreadable))
        if name is None:
            chosen = max(runs, key=lambda each: (_written(log_dir, each), each))
        else:
            chosen = _named(name, list(runs), unreadable)
    except tf.errors.OpError as error:
        raise OSError(f"{log_dir!r} cannot be read: {error.message}") from error
    return runs[chosen], [each for each in runs if each != chosen], unreadable


def listed(names: list[str]) -> str:
    shown = ", ".join(plain(each) for each in names[:_MOST_NAMES])
    more = len(names) - _MOST_NAMES
    return f"{shown} and {more} more" if more > 0 else shown


def _named(name: str, runs: list[str], unreadable: Mapping[str, str]) -> str:
    wanted = os.path.normpath(name)
    for each in (wanted, os.path.normpath(f"{wanted}/{DIRECTORY}")):
        if each in runs:
            return each
        if each in unreadable:
            raise ValueError(f"{each}: {unreadable[each]}")
    raise ValueError(f"There is no training {name!r} in this log. There is: {listed(runs)}.")


def _written(log_dir: str, run: str) -> float:
    latest = 0.0
    for path in event_files(os.path.normpath(f"{log_dir}/{run}") if run != "." else log_dir):
        try:
            latest = max(latest, tf.io.gfile.stat(path).mtime_nsec)
        except READ_ERRORS:  # thinned away meanwhile
            continue
    return latest


def _nothing_there(log_dir: str, unreadable: Mapping[str, str]) -> str:
    directories, others = [], 0
    for directory, _, files in tf.io.gfile.walk(log_dir):
        directories.append(directory)
        others += sum(_EVENT_FILE in name for name in files) - len(event_files(directory))
    where = f"Looked at {count(len(directories), 'directory', 'directories')}"
    text = f"There is no log of keras_het below {log_dir!r}. {where}: {listed(directories)}."
    if unreadable:
        text += f" The log in {listed([*unreadable])} cannot be read: {min(unreadable.values())}"
    if others:
        text += f" {count(others, 'event file')} there of other writers hold no such log."
    return (
        f"{text} A training writes one with keras_het.callbacks.Telemetry({log_dir!r}) among the "
        "callbacks of model.fit, on all workers."
    )
