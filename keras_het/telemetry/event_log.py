"""The log of a training: written by one process, bounded in size, never in the training's way."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
from numpy.typing import ArrayLike

from keras_het.planning.diagnosis.recording import (
    Change,
    Device,
    PipelineRecord,
    Recording,
    StageRecord,
)
from keras_het.planning.pipeline import PipelinePlan, Timeline
from keras_het.tensorboard import log_format
from keras_het.tensorboard.log_content import (
    LogContent,
    UnreadableLogError,
    Value,
    log_content,
    windows,
)

if TYPE_CHECKING:
    from keras_het.strategy.pipeline import PipelineStrategy
    from keras_het.telemetry.step_recorder import StepRecorder


_PASSES_INTERVAL_SECONDS = 10.0
_PROCESS = uuid.uuid4().hex
_STEPS_PER_ROW, _MOST_STEPS_PER_ROW = 4, 2**16
# Of all else than steps, this part of them has its own values.
_OTHER_VALUES = 8
_logger = logging.getLogger(__name__)


class EventLog:
    """Writes what is measured into an event file; without a directory it writes nothing."""

    # The first steps have their own rows. Then a row has the lowest, the median and the highest
    # value of 4 steps, and of twice as many whenever the number of steps has doubled: the log grows
    # with the logarithm of the training, and nothing in it is ever changed. A resumed training adds
    # a file. What goes wrong makes one warning and ends the log, never the training.

    _lock = threading.RLock()  # of the class: tuners copy callbacks

    def __init__(
        self,
        directory: str | os.PathLike[str] | None,
        devices: Sequence[Device],
        hardware_names: Sequence[str] = (),
        keep_steps: int = 20_000,
        *,
        first_step: int | None = None,
    ) -> None:
        self._directory = "" if directory is None else os.fspath(directory)
        self._setup = log_format.setup_text(devices, hardware_names, _PROCESS).encode()
        self._first_step = first_step
        self._keep_steps = keep_steps
        self._file: EventFile | None = None
        # The first of the steps that do not fill a row yet, and their rows.
        self._next = 0
        self._rows = np.zeros((0, len(log_format.ROWS), len(devices)), np.float32)
        self._latest: dict[str, int] = {}
        self._entries: dict[str, tuple[int, list[dict[str, Any]]]] = {}
        self._ended = directory is None

    def write_steps(
        self, first_step: int, block: ArrayLike, measured: ArrayLike | None = None
    ) -> None:
        """Write steps, and which of them were measured; None: all."""
        rows = np.asarray(block, np.float32)
        self._guard(lambda: self._write_rows(first_step, rows, measured))

    def write_hardware(self, step: int, values: ArrayLike) -> None:
        sample = np.asarray(values, np.float32)
        self._guard(lambda: self._write_some(step, {log_format.HARDWARE_SAMPLES: sample}))

    def write_change(self, change: Change) -> None:
        entry = {"kind": change.kind, "text": change.text}
        self._guard(lambda: self._write_entry(log_format.CHANGES, change.step, entry))

    def write_pause(self, step: int, seconds: float) -> None:
        """Write how long it took from the end of an epoch's last step to the next epoch."""
        text = log_format.entries_text([{"seconds": seconds}]).encode()
        self._guard(lambda: self._write(step, {log_format.PAUSES: text}))

    def write_async(self, step: int, worker: int, **values: float) -> None:
        """Write an exchange of a worker outside the sync group."""
        entry = {"worker": worker, **values}
        self._guard(lambda: self._write_entry(log_format.ASYNC, step, entry))

    def write_plan(self, step: int, plan: PipelineRecord) -> None:
        """Write the plan of a model in stages; it holds until the next one."""
        text = log_format.plan_text(plan).encode()
        self._guard(lambda: self._write(step, {log_format.PLAN: text}))

    def write_passes(self, step: int, passes: Timeline) -> None:
        text = log_format.timeline_text(passes).encode()
        self._guard(lambda: self._write_some(step, {log_format.PASSES: text}))

    def write_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write points of plain curves, which TensorBoard's Scalars tab shows."""
        points = {name: np.float32(value) for name, value in values.items()}
        if points:
            self._guard(lambda: self._write_some(step, points))

    def flush(self) -> None:
        self._guard(self._flush)

    def close(self) -> None:
        """End the log; a later call writes nothing."""
        with self._lock:
            self._guard(self._write_remaining)
            self._guard(self._flush)
            self._release()
            self._ended = True

    def _guard(self, write: Callable[[], None]) -> None:
        with self._lock:
            if self._ended:
                return
            try:
                write()
            except Exception as error:  # whatever it is, the training continues
                self._ended = True
                self._release()
                _logger.warning(
                    "Telemetry in %s ends here, the training continues: %s", self._directory, error
                )

    def _release(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except Exception as error:
                _logger.debug("Closing %s: %s", file.path, error)

    def _flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def _write_rows(self, first: int, rows: np.ndarray, measured: ArrayLike | None) -> None:
        if first != self._next + len(self._rows):  # a gap, or steps of which more is known now
            self._write_remaining()
            self._next = first
        rows = np.concatenate([self._rows, rows])
        every = self._steps_per_row(self._next)
        count = len(rows) // every * every
        written = {log_format.STEPS: rows}
        if every > 1:
            written = {log_format.thinned_tag(every): windows(rows[:count], every)}
        elif measured is not None and not np.all(measured):
            written[log_format.MEASURED] = np.asarray(measured, np.float32)
        if count:
            self._write(self._next, written)
        self._next, self._rows = self._next + count, rows[count:]

    def _write_remaining(self) -> None:
        """Write the steps that do not fill a row one by one."""
        if len(self._rows):
            self._write(self._next, {log_format.STEPS: self._rows})
        self._next, self._rows = self._next + len(self._rows), self._rows[:0]

    def _steps_per_row(self, step: int, part: int = 1) -> int:
        times = step * part // self._keep_steps
        return min(_STEPS_PER_ROW << times.bit_length() - 1, _MOST_STEPS_PER_ROW) if times else 1

    def _write_some(self, step: int, values: Mapping[str, Any]) -> None:
        """Write values if they are the first ones of so many steps."""
        every = self._steps_per_row(step, _OTHER_VALUES)
        latest = max(self._latest.get(tag, -1) for tag in values)
        if step == latest or step // every != latest // every:
            self._latest.update(dict.fromkeys(values, step))
            self._write(step, values)

    def _write_entry(self, tag: str, step: int, entry: dict[str, Any]) -> None:
        # TensorBoard keeps one value of a tag and step, the last: it repeats the others.
        last_step, entries = self._entries.get(tag, (-1, []))
        entries = [*entries, entry] if last_step == step else [entry]
        self._entries[tag] = step, entries
        text = log_format.entries_text(entries).encode()
        (self._write_some if tag == log_format.ASYNC else self._write)(step, {tag: text})

    def _write(self, step: int, values: Mapping[str, Any]) -> None:
        if self._file is None:
            self._file = EventFile(self._directory)
            begin = step if self._first_step is None else self._first_step
            self._file.write(begin, {log_format.SETUP: self._setup})
        self._file.write(step, values)


class PipelineLog:
    """Writes what is new of a pipeline."""

    def __init__(self, strategy: PipelineStrategy, recorder: StepRecorder, log: EventLog) -> None:
        self._strategy, self._recorder, self._log = strategy, recorder, log
        self._plan: PipelinePlan | None = None
        self._step = -1
        self._written_at = -_PASSES_INTERVAL_SECONDS

    def write(self, is_last: bool = False) -> None:
        """Write the plan if it is new, and the passes of the latest step if it is time."""
        plan, recorder = self._strategy.plan, self._recorder
        if plan is None:
            return
        if plan is not self._plan:
            self._plan, recorder.pipeline = plan, _record(self._strategy, plan)
            self._log.write_plan(recorder.next_step, recorder.pipeline)
        latest = self._strategy._latest_passes()
        if latest is None:
            return
        step, now = latest[0] + recorder.offset, time.monotonic()
        is_due = is_last or now - self._written_at >= _PASSES_INTERVAL_SECONDS
        if is_due and step > max(self._step, recorder.first_step - 1):
            self._step, self._written_at = step, now
            self._log.write_passes(step, latest[1])


def _record(strategy: PipelineStrategy, plan: PipelinePlan) -> PipelineRecord:
    names = strategy._layer_names
    stages = tuple(
        StageRecord(
            tuple(names[stage.first : stage.end]),
            stage.devices,
            tuple(stage.routes.count(replica) for replica in range(len(stage.devices))),
            tuple(plan.memory_bytes[device] for device in stage.devices),
            tuple(names[unit] for unit in stage.recomputed),
        )
        for stage in plan.stages
    )
    return PipelineRecord(str(plan), stages, strategy.predicted_timeline)


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


def _summary_value(tag: str, value: ArrayLike | bytes) -> tf.compat.v1.Summary.Value:
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


def _content(tensor: tf.compat.v1.TensorProto) -> np.ndarray | bytes:
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
