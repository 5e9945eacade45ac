"""The log of a training: written by one process, bounded in size, never in the training's way."""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from keras_het.planning.diagnosis.recording import Change, Device, PipelineRecord, StageRecord
from keras_het.planning.pipeline import PipelinePlan, Timeline
from keras_het.telemetry.event_files import EventFile, event_files, file_names, read_events
from keras_het.tensorboard import log_format
from keras_het.tensorboard.log_content import Value, is_readable, windows

if TYPE_CHECKING:
    from keras_het.strategy.pipeline import PipelineStrategy
    from keras_het.telemetry.step_recorder import StepRecorder

_THINNED_AS_THEY_ARE = (log_format.SETUP, log_format.PLAN, log_format.CHANGES, log_format.PAUSES)
_PASSES_INTERVAL_SECONDS = 10.0
_PROCESS = uuid.uuid4().hex
_logger = logging.getLogger("keras_het")


class EventLog:
    """Writes what is measured into event files, which TensorBoard and `read_log` read.

    Every so many steps a new file begins. When the files hold more than `keep_steps` steps, the
    oldest one is replaced by one that has the lowest, the median and the highest value of each 32
    steps. A training that is resumed adds files to those that are there: its setup, at
    `first_step`, begins a generation.

    What goes wrong with the log makes one warning and ends the log, never the training. Calls may
    come from several threads.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        devices: Sequence[Device],
        hardware_names: Sequence[str] = (),
        keep_steps: int = 20_000,
        *,
        first_step: int | None = None,
        segment_steps: int = 2_000,
        every: int = 32,
    ) -> None:
        self._directory = os.fspath(directory)
        self._num_replicas = len(devices)
        self._num_quantities = len(hardware_names)
        self._setup = log_format.setup_text(devices, hardware_names, _PROCESS).encode()
        self._first_step = first_step
        self._keep_steps, self._segment_steps, self._every = keep_steps, segment_steps, every
        self._lock = threading.RLock()
        self._names: Iterator[str] | None = None
        self._file: EventFile | None = None
        self._steps_in_file = 0
        self._plan: bytes | None = None
        self._raw: dict[str, int] = {}  # steps of each earlier file that is not thinned
        self._entries: dict[str, tuple[int, list[dict[str, Any]]]] = {}
        self._time = 0.0
        self._ended = False

    def write_steps(self, first_step: int, block: Any, measured: Any = None) -> None:
        """Write steps, and which of them were measured; None: all."""
        values = np.asarray(block, np.float32)
        self._check_shape("block", values.shape[1:], (len(log_format.ROWS), self._num_replicas))
        if len(values):
            written = {log_format.STEPS: values}
            if measured is not None and not np.all(measured):
                written[log_format.MEASURED] = np.asarray(measured, np.float32)
            self._guard(lambda: self._write_block(first_step, written))

    def write_hardware(self, step: int, values: Any) -> None:
        sample = np.asarray(values, np.float32)
        self._check_shape("values", sample.shape, (self._num_replicas, self._num_quantities))
        self._guard(lambda: self._write(step, {log_format.HARDWARE_SAMPLES: sample}))

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

        def write() -> None:
            self._write(step, {log_format.PLAN: text})
            self._plan = text  # each further file begins with it

        self._guard(write)

    def write_passes(self, step: int, passes: Timeline) -> None:
        text = log_format.timeline_text(passes).encode()
        self._guard(lambda: self._write(step, {log_format.PASSES: text}))

    def write_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write points of plain curves, which TensorBoard's Scalars tab shows."""
        points = {name: np.float32(value) for name, value in values.items()}
        if points:
            self._guard(lambda: self._write(step, points))

    def flush(self) -> None:
        self._guard(self._flush)

    def close(self) -> None:
        """End the log; a later call writes nothing."""
        with self._lock:
            self._guard(self._flush)
            self._release()
            self._ended = True

    def _check_shape(self, name: str, shape: Sequence[int], expected: Sequence[int]) -> None:
        if tuple(shape) != tuple(expected):
            raise ValueError(
                f"{name} does not fit the devices of the log. "
                f"Received: last dimensions {tuple(shape)}; expected: {tuple(expected)}."
            )

    def _guard(self, write: Callable[[], None]) -> None:
        with self._lock:
            if self._ended:
                return
            try:
                write()
            except Exception as error:  # whatever it is, the training goes on
                self._ended = True
                self._release()
                _logger.warning(
                    "Telemetry in %s ends here, the training goes on: %s", self._directory, error
                )

    def _release(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except Exception as error:
                _logger.debug("Closing %s: %s", file.path, error)

    def _flush(self) -> None:
        if self._file is None:
            return
        self._file.flush()
        # Writing to a file that somebody has removed is no error to the system.
        if not tf.io.gfile.exists(self._file.path):
            raise FileNotFoundError(f"{self._file.path} was removed.")

    def _write_block(self, first_step: int, values: Mapping[str, Any]) -> None:
        number = len(values[log_format.STEPS])
        if self._steps_in_file and self._steps_in_file + number > self._segment_steps:
            self._flush()
            if self._file is not None:
                self._raw[self._file.path] = self._steps_in_file
            self._release()
            self._thin_old()
        self._write(first_step, values)
        self._steps_in_file += number

    def _write_entry(self, tag: str, step: int, entry: dict[str, Any]) -> None:
        # TensorBoard keeps one value of a tag and step, the last: it repeats the others.
        last_step, entries = self._entries.get(tag, (-1, []))
        entries = [*entries, entry] if last_step == step else [entry]
        self._entries[tag] = step, entries
        self._write(step, {tag: log_format.entries_text(entries).encode()})

    def _write(self, step: int, values: Mapping[str, Any]) -> None:
        file = self._file or self._open(step)
        now = self._now()
        file.write([Value(tag, step, now, value) for tag, value in values.items()])

    def _now(self) -> float:
        # Readers order values by time; a clock that is put back must not change the order.
        self._time = max(time.time(), self._time + 1e-6)
        return self._time

    def _open(self, step: int) -> EventFile:
        if self._names is None:
            tf.io.gfile.makedirs(self._directory)
            self._names = file_names(self._directory)
            for path in event_files(self._directory):
                if steps := _raw_steps_in(path):
                    self._raw[path] = steps
            self._thin_old()
        self._file = file = EventFile(next(self._names))
        self._steps_in_file = 0
        now = self._now()
        begin, self._first_step = self._first_step, None
        begin = step if begin is None else begin
        first = [Value(log_format.SETUP, begin, now, self._setup)]
        if self._plan is not None:
            first.append(Value(log_format.PLAN, step, now, self._plan))
        file.write(first)
        return file

    def _thin_old(self) -> None:
        """Leave room for a file's steps in what is kept one by one."""
        room = max(self._keep_steps - self._segment_steps, 0)
        for path in sorted(self._raw):
            if sum(self._raw.values()) <= room:
                return
            _thinned_file(path, self._every)
            del self._raw[path]


def _raw_steps_in(path: str) -> int:
    return sum(len(each.value) for each in _readable(path) if each.tag == log_format.STEPS)


def _thinned_file(path: str, every: int) -> None:
    """Replace an event file by a thinned one.

    Steps become rows of (lowest, median, highest), of other series the last value of each window
    stays; setups, plans and changes stay as they are. The new file is complete before it takes the
    place of the old one, whose name it has: a reader finds one of them, at the same position.
    """
    values = _thinned(_readable(path), every)
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


def _thinned(values: Sequence[Value], every: int) -> list[Value]:
    kept = list(_thinned_steps([each for each in values if each.tag == log_format.STEPS], every))
    last: dict[tuple[str, int], Value] = {}
    for each in values:
        if each.tag in _THINNED_AS_THEY_ARE or log_format.steps_per_row(each.tag) > 1:
            kept.append(each)
        elif each.tag not in (log_format.STEPS, log_format.MEASURED):
            last[each.tag, each.step // every] = each
    return sorted([*kept, *last.values()], key=lambda each: each.time)


def _thinned_steps(blocks: Sequence[Value], every: int) -> Iterator[Value]:
    """Values of thinned steps, one for each run of blocks without a gap."""
    runs: list[list[Value]] = []
    expected: tuple[int, tuple[int, ...]] | None = None
    for block in blocks:
        shape = block.value.shape[1:]
        if expected != (block.step, shape):
            runs.append([])
        runs[-1].append(block)
        expected = block.step + len(block.value), shape
    for first, *more in runs:
        rows = np.concatenate([first.value, *(each.value for each in more)])
        yield Value(log_format.thinned_tag(every), first.step, first.time, windows(rows, every))


class PipelineLog:
    """Writes what is new of a pipeline."""

    def __init__(
        self, strategy: PipelineStrategy, recorder: StepRecorder, log: EventLog | None
    ) -> None:
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
            if self._log is not None:
                self._log.write_plan(recorder.next_step, recorder.pipeline)
        latest = self._strategy._latest_passes()
        if latest is None or self._log is None:
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
    return PipelineRecord(str(plan), stages, strategy.timeline)
