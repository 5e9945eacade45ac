"""The log of a training: written by one process, bounded in size, never in the training's way."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_het.planning.diagnosis.recording import Change, Device, PipelineRecord
from keras_het.planning.pipeline import Timeline
from keras_het.telemetry.event_files import EventFile, FileNames, event_files
from keras_het.telemetry.thinning import raw_steps_in, thinned_file
from keras_het.tensorboard import log_format, pipeline_format
from keras_het.tensorboard.log_content import Value

_logger = logging.getLogger("keras_het")


class EventLog:
    """Writes what is measured into event files, which TensorBoard and `read_log` read.

    Every so many steps a new file begins. When the files hold more than `keep_steps` steps, the
    oldest one is replaced by one that has the lowest, the median and the highest value of each 32
    steps. A training that is resumed adds files to those that are there.

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
        segment_steps: int = 2_000,
        every: int = 32,
    ) -> None:
        self._directory = os.fspath(directory)
        self._num_replicas = len(devices)
        self._num_quantities = len(hardware_names)
        self._setup = log_format.setup_text(devices, hardware_names).encode()
        self._keep_steps, self._segment_steps, self._every = keep_steps, segment_steps, every
        self._lock = threading.RLock()
        self._names: FileNames | None = None
        self._file: EventFile | None = None
        self._steps_in_file = 0
        self._plan: bytes | None = None
        self._raw: dict[str, int] = {}  # steps of each earlier file that is not thinned
        self._entries: dict[str, tuple[int, list[dict[str, Any]]]] = {}
        self._time = 0.0
        self._ended = False

    def write_steps(self, first_step: int, block: Any) -> None:
        """Write the times and shares of consecutive steps."""
        values = np.asarray(block, np.float32)
        self._check_shape("block", values.shape[1:], (len(log_format.ROWS), self._num_replicas))
        if len(values):
            self._guard(lambda: self._write_block(first_step, values))

    def write_hardware(self, step: int, values: Any) -> None:
        """Write a sample of the hardware's state."""
        sample = np.asarray(values, np.float32)
        self._check_shape("values", sample.shape, (self._num_replicas, self._num_quantities))
        self._guard(lambda: self._write(step, {log_format.HARDWARE_SAMPLES: sample}))

    def write_change(self, change: Change) -> None:
        """Write that something was changed in the running training."""
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
        text = pipeline_format.plan_text(plan).encode()

        def write() -> None:
            self._write(step, {log_format.PLAN: text})
            self._plan = text  # each further file begins with it

        self._guard(write)

    def write_passes(self, step: int, passes: Timeline) -> None:
        """Write when the passes of a step of a pipeline were."""
        text = pipeline_format.timeline_text(passes).encode()
        self._guard(lambda: self._write(step, {log_format.PASSES: text}))

    def write_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write points of plain curves, which TensorBoard's Scalars tab shows."""
        points = {name: np.float32(value) for name, value in values.items()}
        if points:
            self._guard(lambda: self._write(step, points))

    def flush(self) -> None:
        """Hand what was written to the file system, so that a reader sees it."""
        if self._file is not None:
            self._guard(self._flush)

    def close(self) -> None:
        """End the log; a later call writes nothing."""
        with self._lock:
            if self._file is not None:
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

    def _write_block(self, first_step: int, values: Any) -> None:
        if self._steps_in_file and self._steps_in_file + len(values) > self._segment_steps:
            self._next_file()
        self._write(first_step, {log_format.STEPS: values})
        self._steps_in_file += len(values)

    def _write_entry(self, tag: str, step: int, entry: dict[str, Any]) -> None:
        # TensorBoard keeps one value of a tag and step, the last: it repeats the others.
        last_step, entries = self._entries.get(tag, (-1, []))
        entries = [*entries, entry] if last_step == step else [entry]
        self._entries[tag] = step, entries
        self._write(step, {tag: log_format.entries_text(entries).encode()})

    def _write(self, step: int, values: Mapping[str, Any]) -> None:
        if self._file is None:
            self._open(step)
        if self._file is not None:
            now = self._now()
            self._file.write([Value(tag, step, now, value) for tag, value in values.items()])

    def _now(self) -> float:
        # Readers order values by time; a clock that is put back must not change the order.
        self._time = max(time.time(), self._time + 1e-6)
        return self._time

    def _open(self, step: int) -> None:
        if self._names is None:
            tf.io.gfile.makedirs(self._directory)
            self._names = FileNames(self._directory)
            for path in event_files(self._directory):
                if steps := raw_steps_in(path):
                    self._raw[path] = steps
            self._thin_old()
        self._file = EventFile(self._names.next())
        self._steps_in_file = 0
        now = self._now()
        first = [Value(log_format.SETUP, step, now, self._setup)]
        if self._plan is not None:
            first.append(Value(log_format.PLAN, step, now, self._plan))
        self._file.write(first)

    def _next_file(self) -> None:
        self._flush()
        if self._file is not None:
            self._raw[self._file.path] = self._steps_in_file
        self._release()
        self._thin_old()

    def _thin_old(self) -> None:
        """Leave room for a file's steps in what is kept one by one."""
        room = max(self._keep_steps - self._segment_steps, 0)
        for path in sorted(self._raw):
            if sum(self._raw.values()) <= room:
                return
            thinned_file(path, self._every)
            del self._raw[path]
