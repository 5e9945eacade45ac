"""Event files, as TensorBoard reads them: events of our values, written and read."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

from keras_het.planning.diagnosis.recording import Recording
from keras_het.tensorboard import log_format
from keras_het.tensorboard.log_content import LogContent, UnreadableLogError, Value, log_content


_SCALAR, _TENSOR = 1, 2  # of tensorboard.DataClass, which TensorFlow's public API has not

# What is read at once: memory takes several times as much.
_MOST_BYTES = 2**29
READ_ERRORS = (OSError, tf.errors.OpError)
"""What reading or writing a file raises, on a disk or a remote file system."""


def event_files(directory: str) -> list[str]:
    """Return the paths of a directory's files of ours in the order of writing."""
    names = tf.io.gfile.listdir(directory) if tf.io.gfile.isdir(directory) else []
    return [os.path.join(directory, name) for name in log_format.own_files(names)]  # noqa: PTH118 - may be a URL


class EventFile:
    """An event file that is being written."""

    def __init__(self, directory: str) -> None:
        # Its name, and the times of its values, come after all that the directory has: a clock that
        # was put back, or another machine's, must not bring them into another order.
        tf.io.gfile.makedirs(directory)
        written = [tf.io.gfile.stat(path).mtime_nsec * 1e-9 for path in event_files(directory)]
        now, latest = time.time(), max(written, default=0.0)
        self._time = now if now > latest else latest + 1.0
        name = f"{log_format.FILE_PREFIX}{self._time:017.6f}.{os.getpid()}{log_format.FILE_SUFFIX}"
        self.path = os.path.join(directory, name)  # noqa: PTH118 - may be a URL
        self._writer = tf.io.TFRecordWriter(self.path)
        first = tf.compat.v1.Event(wall_time=self._time, file_version="brain.Event:2")
        self._writer.write(first.SerializeToString())

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        self._time = max(time.time(), self._time + 1e-6)
        summary = tf.compat.v1.Summary(value=itertools.starmap(_summary_value, values.items()))
        event = tf.compat.v1.Event(wall_time=self._time, step=step, summary=summary)
        self._writer.write(event.SerializeToString())

    def flush(self) -> None:
        self._writer.flush()
        # writing to a file that somebody has removed is no error to the system
        if not tf.io.gfile.exists(self.path):
            raise FileNotFoundError(f"{self.path} was removed.")

    def close(self) -> None:
        self._writer.close()


def _summary_value(tag: str, value: Any) -> Any:
    is_curve = tag in log_format.CURVES
    metadata = tf.compat.v1.SummaryMetadata(
        summary_description=log_format.CURVES.get(tag, ""),
        data_class=_SCALAR if is_curve else _TENSOR,
    )
    metadata.plugin_data.plugin_name = "scalars" if is_curve else log_format.PLUGIN
    if not is_curve:
        metadata.plugin_data.content = log_format.metadata_content()
    return tf.compat.v1.Summary.Value(
        tag=tag, metadata=metadata, tensor=tf.make_tensor_proto(value)
    )


def _records(path: str) -> Iterator[bytes]:
    """Yield the records of a file up to its first damage, as TensorBoard reads them."""
    some = tf.data.TFRecordDataset(path, buffer_size=2**18).ignore_errors().batch(100)
    yield from itertools.chain.from_iterable(some.as_numpy_iterator())


def _values(record: bytes) -> list[Value]:
    event = tf.compat.v1.Event.FromString(record)
    return [
        Value(each.tag, event.step, event.wall_time, _content(each.tensor))
        for each in event.summary.value
    ]


def _content(tensor: Any) -> Any:
    """An array, or the bytes of a text."""
    return tensor.string_val[0] if tensor.string_val else tf.make_ndarray(tensor)


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
    """Read a training's event files; of a log that is too large, the latest ones."""
    values: list[Value] = []
    room = _MOST_BYTES
    for path in reversed(paths):
        with contextlib.suppress(*READ_ERRORS):  # removed meanwhile
            for record in _records(path):
                room -= len(record)
                if room < 0:
                    message = f"The log is too large: a part of {path}, and older files, left out."
                    return log_content(values, [message])
                values += _values(record)
    return log_content(values)


def read_log(log_dir: str | os.PathLike[str]) -> list[Run]:
    """Read the logs of all trainings below a directory that can be read, by name."""
    runs = []
    for name, paths in runs_below(log_dir).items():
        with contextlib.suppress(UnreadableLogError):
            runs.append(Run(name, read_run(paths)))
    return runs
