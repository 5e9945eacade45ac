"""A training as a trace in the Chrome trace event format, which Perfetto opens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from keras_het.launch.report_terminal import change_text
from keras_het.planning.diagnosis.statistics import checked
from keras_het.tensorboard import views
from keras_het.tensorboard.log_content import LogContent

MOST_SLICES = 600_000
"""Slices of a trace: Perfetto opens so many at once, in a file of some 60 MB."""
_ORDER = ("input", "compute", "sync", "other")
_TO_MICROSECONDS = 1e6

Event = dict[str, Any]


def write_trace(path: Path, content: LogContent) -> int | None:
    """Write the latest steps as a trace; return the first of them if there are earlier ones."""
    steps = content.recording.steps
    replicas = max(len(content.recording.devices), 1)
    first = max(len(steps) - max(MOST_SLICES // (len(_ORDER) * replicas), 1), 0)
    with path.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[')
        separator = "\n"
        for event in _Trace(content, first).events():
            text = json.dumps(event, separators=(",", ":"), allow_nan=False)
            file.write(f"{separator}{text}")
            separator = ",\n"
        file.write("\n]}\n")
    return int(steps[first]) if first else None


class _Trace:
    """A process for each worker, a thread for each replica."""

    # The log has the length of each phase, not when it began: all replicas begin a step together. A
    # row that stands for several steps is one slice of their length.

    def __init__(self, content: LogContent, first: int) -> None:
        self._content, self._recording = content, content.recording
        self._devices = content.recording.devices
        workers = sorted({device.worker for device in self._devices})
        # process 0 has a special meaning in traces
        processes = {worker: number for number, worker in enumerate(workers, start=1)}
        self._processes = [processes[device.worker] for device in self._devices]
        self._training = len(workers) + 1
        self._first, self._steps = first, self._recording.steps[first:]
        self._every = content.every[first:].astype(np.float64)
        self._phases = np.stack([checked(getattr(self._recording, n)[first:]) for n in _ORDER])
        wall = np.nansum(self._phases, axis=0).max(axis=1, initial=0.0)
        # when each row begins, and when the last one ends, in seconds
        self._begins = np.concatenate([[0.0], np.cumsum(wall * self._every)])

    def events(self) -> Iterator[Event]:
        yield from self._names()
        yield from self._slices()
        yield from self._counters()
        yield from self._passes()
        instant = {"ph": "i", "s": "g", "pid": self._training, "tid": self._training}
        for message in self._content.messages:
            yield {**instant, "name": f"Log: {message}", "cat": "log", "ts": 0.0, "args": {}}
        for change in sorted(self._recording.changes, key=lambda each: each.step):
            if len(self._steps) and change.step >= self._steps[0]:
                named = {**instant, "name": change_text(change.kind, change.text)}
                time = _micro(self._begins[int(np.searchsorted(self._steps, change.step))])
                yield {**named, "cat": change.kind, "ts": time, "args": {"step": change.step}}

    def _thread(self, index: int, of_passes: bool = False) -> int:
        return self._training + 1 + index + of_passes * len(self._devices)

    def _names(self) -> Iterator[Event]:
        yield _name("process_name", self._training, self._training, "training")
        for process, device in dict(zip(self._processes, self._devices, strict=True)).items():
            host = f" ({device.host})" if device.host else ""
            yield _name("process_name", process, process, f"worker {device.worker}{host}")
        for index, device in enumerate(self._devices):
            product = f" ({device.model})" if device.model else ""
            place = self._processes[index], self._thread(index)
            yield _name("thread_name", *place, f"{device.name}{product}")

    def _slices(self) -> Iterator[Event]:
        for row, step in enumerate(self._steps.tolist()):
            for index, process in enumerate(self._processes):
                end = self._begins[row]
                for name, seconds in zip(_ORDER, self._phases[:, row, index].tolist(), strict=True):
                    if not seconds > 0:  # nor NaN
                        continue
                    # rounded ends: slices of a track must not overlap
                    begin = _micro(end)
                    end = min(end + seconds * self._every[row], self._begins[row + 1])
                    place = {"pid": process, "tid": self._thread(index), "cat": "step"}
                    yield _slice(name, begin, _micro(end), {"step": step}, **place)

    def _counters(self) -> Iterator[Event]:
        shares = checked(self._recording.shares[self._first :], np.inf)
        shares = np.where(np.isfinite(shares), shares, 0.0)
        for device, process, column in zip(self._devices, self._processes, shares.T, strict=True):
            for row in np.flatnonzero(np.diff(column, prepend=-1.0)).tolist():
                value = {"samples": float(column[row])}
                yield _counter(f"share {device.name}", process, self._begins[row], value)
        stages = len(self._recording.pipeline.stages) if self._recording.pipeline else 1
        samples = shares.sum(axis=1) * self._every / max(stages, 1)
        for row, seconds in enumerate(np.diff(self._begins).tolist()):
            if seconds > 0:
                value = {"samples/s": float(np.nan_to_num(samples[row] / seconds, posinf=0.0))}
                yield _counter("samples/s", self._training, self._begins[row], value)

    def _passes(self) -> Iterator[Event]:
        """Yield a pipeline's passes in separate threads; a step's begin with its batch."""
        passes = [*views.measured_timeline(self._content)][::-1]
        for index, device in enumerate(self._devices if passes else ()):
            process, thread = self._processes[index], self._thread(index, of_passes=True)
            yield _name("thread_name", process, thread, f"{device.name}: passes")
            end = 0.0
            for step, timeline in passes:
                row = int(np.searchsorted(self._steps, step))
                if row == len(self._steps) or self._steps[row] != step:
                    continue
                waited = self._recording.input[self._first + row, index]
                origin = self._begins[row] + (waited if np.isfinite(waited) else 0.0)
                for each in timeline.events[index]:
                    begin = max(end, _micro(origin + each.begin))
                    end = max(begin, _micro(min(origin + each.end, self._begins[row + 1])))
                    if end > begin:
                        which = {"step": step, "stage": each.stage, "micro": each.micro_batch}
                        place = {"pid": process, "tid": thread, "cat": "pass"}
                        yield _slice(each.kind, begin, end, which, **place)


def _name(kind: str, process: int, thread: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def _slice(name: str, begin: float, end: float, arguments: Event, **place: object) -> Event:
    duration = round(end - begin, 1)
    return {"ph": "X", "name": name, **place, "ts": begin, "dur": duration, "args": arguments}


def _counter(name: str, process: int, seconds: float, value: Event) -> Event:
    return {"ph": "C", "name": name, "pid": process, "ts": _micro(seconds), "args": value}


def _micro(seconds: float) -> float:
    return round(float(seconds) * _TO_MICROSECONDS, 1)
