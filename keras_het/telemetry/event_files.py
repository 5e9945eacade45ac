"""Event files, as TensorBoard reads them: events of our values, written and read."""

from __future__ import annotations

import logging
import os
import re
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from keras_het.tensorboard import log_format
from keras_het.tensorboard.log_content import Value

_logger = logging.getLogger("keras_het")
_SCALAR, _TENSOR = 1, 2  # of tensorboard.DataClass, which TensorFlow's public API has not
_LENGTH = struct.Struct("<Q")
_CHECKSUM = 4  # bytes after the length, and after the data
_STAMP = re.compile(rf"^{re.escape(log_format.FILE_PREFIX)}(\d{{10,}})\.")

READ_ERRORS = (OSError, tf.errors.OpError)
"""What reading or writing a file raises, on a disk or a remote file system."""


def event_files(directory: str) -> list[str]:
    """Return the paths of a directory's files of ours in the order of writing."""
    names = tf.io.gfile.listdir(directory) if tf.io.gfile.isdir(directory) else []
    ours = [
        name
        for name in names
        if name.startswith(log_format.FILE_PREFIX) and name.endswith(log_format.FILE_SUFFIX)
    ]
    return [os.path.join(directory, name) for name in sorted(ours)]  # noqa: PTH118 - may be a URL


class FileNames:
    """Names for the files of one process: each comes after all that the directory has.

    Args:
        directory: where the files are.
    """

    def __init__(self, directory: str) -> None:
        # A clock that was put back, or another machine's, must not bring them into another order.
        stamps = [
            int(found.group(1))
            for path in event_files(directory)
            if (found := _STAMP.match(path.rpartition("/")[2]))
        ]
        stamp = max([int(time.time()), *(stamp + 1 for stamp in stamps)])
        host = re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname()) or "host"
        self._start = f"{log_format.FILE_PREFIX}{stamp:010d}.{host}.{os.getpid()}"
        self._directory = directory
        self._number = 0

    def next(self) -> str:
        """Return the path of the next file."""
        name = f"{self._start}.{self._number:06d}{log_format.FILE_SUFFIX}"
        self._number += 1
        return os.path.join(self._directory, name)  # noqa: PTH118 - may be a URL


class EventFile:
    """An event file that is being written.

    Args:
        path: of the file; an existing one is replaced.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._writer = tf.io.TFRecordWriter(path)
        first = tf.compat.v1.Event(wall_time=time.time(), file_version="brain.Event:2")
        self._writer.write(first.SerializeToString())

    def write(self, values: list[Value]) -> None:
        """Write values of one step and time as an event."""
        summary = tf.compat.v1.Summary(value=[_summary_value(each) for each in values])
        event = tf.compat.v1.Event(wall_time=values[0].time, step=values[0].step, summary=summary)
        self._writer.write(event.SerializeToString())

    def flush(self) -> None:
        """Hand what was written to the file system."""
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
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


def read_events(path: str, damage: list[str] | None = None) -> Iterator[Value]:
    """Yield the values of an event file as far as they are whole.

    Args:
        path: of the file.
        damage: gets the path, once for each record that cannot be read.
    """
    for record in _records(path):
        try:
            event = tf.compat.v1.Event.FromString(record)
            values = [_value(event, each) for each in event.summary.value]
        except Exception as error:  # whatever a damaged record makes of itself
            _logger.debug("A record of %s cannot be read: %s", path, error)
            if damage is not None:
                damage.append(path)
            continue
        yield from (each for each in values if each is not None)


def _value(event: Any, value: Any) -> Value | None:
    if not value.HasField("tensor"):
        return None
    array = np.asarray(tf.make_ndarray(value.tensor))
    content = array.item() if array.dtype == object and array.size == 1 else array
    return Value(value.tag, int(event.step), float(event.wall_time), content)


def _records(path: str) -> Iterator[bytes]:
    """Records of a TFRecord file; the last may be torn, or still be in writing."""
    with tf.io.gfile.GFile(path, "rb") as file:
        left = file.size()
        while left >= _LENGTH.size + 2 * _CHECKSUM:
            (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
            file.read(_CHECKSUM)
            left -= _LENGTH.size + 2 * _CHECKSUM + length
            if left < 0:
                return
            record = file.read(length)
            file.read(_CHECKSUM)
            yield record
