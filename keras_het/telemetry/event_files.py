"""Event files, as TensorBoard reads them: events of our values, written and read."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import re
import socket
import time
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from keras_het.planning.diagnosis.recording import Recording
from keras_het.tensorboard import log_format
from keras_het.tensorboard.log_content import LogContent, NoSetupError, Value
from keras_het.tensorboard.log_files import content_of, values_of

_SCALAR, _TENSOR = 1, 2  # of tensorboard.DataClass, which TensorFlow's public API has not
_STAMP = re.compile(rf"^{re.escape(log_format.FILE_PREFIX)}(\d{{10,}})\.")

parse_event = tf.compat.v1.Event.FromString
READ_ERRORS = (OSError, tf.errors.OpError)
"""What reading or writing a file raises, on a disk or a remote file system."""


def event_files(directory: str) -> list[str]:
    """Return the paths of a directory's files of ours in the order of writing."""
    names = tf.io.gfile.listdir(directory) if tf.io.gfile.isdir(directory) else []
    return [os.path.join(directory, name) for name in log_format.own_files(names)]  # noqa: PTH118 - may be a URL


def file_names(directory: str) -> Iterator[str]:
    """Paths for the files of one process: each comes after all that the directory has."""
    # A clock that was put back, or another machine's, must not bring them into another order.
    stamps = [
        int(found.group(1))
        for path in event_files(directory)
        if (found := _STAMP.match(path.rpartition("/")[2]))
    ]
    stamp = max([int(time.time()), *(stamp + 1 for stamp in stamps)])
    host = re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname()) or "host"
    start = f"{log_format.FILE_PREFIX}{stamp:010d}.{host}.{os.getpid()}"
    for number in itertools.count():
        name = f"{start}.{number:06d}{log_format.FILE_SUFFIX}"
        yield os.path.join(directory, name)  # noqa: PTH118 - may be a URL


class EventFile:
    """An event file that is being written."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._writer = tf.io.TFRecordWriter(path)
        first = tf.compat.v1.Event(wall_time=time.time(), file_version="brain.Event:2")
        self._writer.write(first.SerializeToString())

    def write(self, values: list[Value]) -> None:
        summary = tf.compat.v1.Summary(value=[_summary_value(each) for each in values])
        event = tf.compat.v1.Event(wall_time=values[0].time, step=values[0].step, summary=summary)
        self._writer.write(event.SerializeToString())

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _summary_value(value: Value) -> Any:
    is_curve = not value.tag.startswith(f"{log_format.PLUGIN}/")
    metadata = tf.compat.v1.SummaryMetadata(
        summary_description=log_format.description(value.tag),
        data_class=_SCALAR if is_curve else _TENSOR,
    )
    metadata.plugin_data.plugin_name = "scalars" if is_curve else log_format.PLUGIN
    if not is_curve:
        metadata.plugin_data.content = log_format.metadata_content()
    tensor = tf.make_tensor_proto(value.value)
    return tf.compat.v1.Summary.Value(tag=value.tag, metadata=metadata, tensor=tensor)


def content_at(path: str, most: int = 2**40) -> bytes:
    """Return what a file holds, of a long one its first bytes."""
    with tf.io.gfile.GFile(path, "rb") as file:
        return file.read(min(most, file.size()))


def read_events(path: str) -> list[Value]:
    """Return the values of an event file's whole records."""
    return values_of(content_at(path), parse_event)[0]


@dataclasses.dataclass(frozen=True)
class Run:
    """A training that has left a log."""

    name: str
    content: LogContent

    @property
    def recording(self) -> Recording:
        return self.content.recording


def runs_below(log_dir: str | os.PathLike[str]) -> dict[str, list[str]]:
    """Return the event files of all trainings below a directory, by their names."""
    root = os.fspath(log_dir)
    if not tf.io.gfile.isdir(root):
        raise FileNotFoundError(f"There is no log directory. Received: log_dir={root!r}.")
    folders = sorted(directory for directory, _, _ in tf.io.gfile.walk(root))
    found = {os.path.relpath(each, root): event_files(each) for each in folders}
    return {name: paths for name, paths in found.items() if paths}


def read_run(paths: list[str]) -> LogContent:
    return content_of(paths, content_at, parse_event, READ_ERRORS)


def read_log(log_dir: str | os.PathLike[str]) -> list[Run]:
    """Read the logs of all trainings below a directory that can be read, by name."""
    runs = []
    for name, paths in runs_below(log_dir).items():
        with contextlib.suppress(NoSetupError):
            runs.append(Run(name, read_run(paths)))
    return runs
