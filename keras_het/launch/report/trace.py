"""A training as a trace in the Chrome trace event format, which Perfetto opens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from keras_het.launch.report.plain_text import change_text
from keras_het.planning.diagnosis.middles import checked
from keras_het.planning.diagnosis.recording import Device, Floats, Integers
from keras_het.tensorboard import views
from keras_het.tensorboard.log_content import LogContent

MOST_SLICES = 600_000
"""Slices of a trace: Perfetto opens so many at once, in a file of some 60 MB."""
_ORDER = ("input", "compute", "sync", "other")
_TO_MICROSECONDS = 1e6

Event = dict[str, Any]


def write_trace(path: Path, content: LogContent) -> int | None:
    """Write a trace: a process for each worker, a thread for each replica.

    The log has the length of each phase, not when it began: all replicas begin a step together. A
    row that stands for several old steps is one slice of their length.
    """
    replicas = max(len(content.recording.devices), 1)
    rows = max(MOST_SLICES // (len(_ORDER) * replicas), 1)
    first = max(len(content.recording.steps) - rows, 0)
    with path.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[')
        separator = "\n"
        for event in _events(content, first):
            text = json.dumps(event, separators=(",", ":"), allow_nan=False)
            file.write(f"{separator}{text}")
            separator = ",\n"
        file.write("\n]}\n")
    return int(content.recording.steps[first]) if first else None


def _events(content: LogContent, first: int) -> Iterator[Event]:
    recording = content.recording
    workers = sorted({device.worker for device in recording.devices})
    # process 0 has a meaning of its own in traces
    processes = {worker: number for number, worker in enumerate(workers, start=1)}
    threads = [len(processes) + 2 + index for index in range(len(recording.devices))]
    training = len(processes) + 1
    yield from _names(recording.devices, processes, threads, training)
    steps, every = recording.steps[first:], content.every[first:].astype(np.float64)
    phases = np.stack([checked(getattr(recording, name)[first:]) for name in _ORDER])
    wall = np.nansum(phases, axis=0).max(axis=1, initial=0.0)
    # when each row begins, and when the last one ends, in seconds
    begins: Floats = np.concatenate([[0.0], np.cumsum(wall * every)])
    for row, step in enumerate(steps.tolist()):
        for index, device in enumerate(recording.devices):
            end = begins[row]
            for name, seconds in zip(_ORDER, phases[:, row, index].tolist(), strict=True):
                if not seconds > 0:  # nor NaN
                    continue
                # rounded ends: slices of a track must not overlap
                begin, end = _micro(end), min(end + seconds * every[row], begins[row + 1])
                place = {"pid": processes[device.worker], "tid": threads[index], "cat": "step"}
                yield _slice(name, begin, _micro(end), {"step": step}, **place)
    shares = checked(recording.shares[first:], np.inf)
    shares = np.where(np.isfinite(shares), shares, 0.0)
    yield from _counters(recording.devices, processes, shares, begins)
    stages = 1 if recording.pipeline is None else max(len(recording.pipeline.stages), 1)
    yield from _speeds(training, shares / stages, begins, every)
    yield from _passes(content, processes, threads, steps, begins)
    instant = {"ph": "i", "s": "g", "pid": training, "tid": training}
    for message in views.messages(content):
        yield {**instant, "name": f"Log: {message}", "cat": "log", "ts": 0.0, "args": {}}
    for change in sorted(recording.changes, key=lambda each: each.step):
        if len(steps) and change.step >= steps[0]:
            named = {**instant, "name": change_text(change.kind, change.text), "cat": change.kind}
            time = _micro(begins[int(np.searchsorted(steps, change.step))])
            yield {**named, "ts": time, "args": {"step": change.step}}


def _passes(
    content: LogContent,
    processes: dict[int, int],
    threads: list[int],
    steps: Integers,
    begins: Floats,
) -> Iterator[Event]:
    """Yield a pipeline's passes in threads of their own; a step's begin when its batch is there."""
    devices, passes = content.recording.devices, [*views.measured_passes(content)][::-1]
    for index, device in enumerate(devices if passes else ()):
        process, thread = processes[device.worker], threads[-1] + 1 + index
        yield _name("thread_name", process, thread, f"{device.name}: passes")
        end = 0.0
        for step, timeline in passes:
            row = int(np.searchsorted(steps, step))
            if row == len(steps) or steps[row] != step:
                continue
            waited = content.recording.input[np.searchsorted(content.recording.steps, step), index]
            origin = begins[row] + (waited if np.isfinite(waited) else 0.0)
            for each in timeline.events[index]:
                begin = max(end, _micro(origin + each.begin))
                end = max(begin, _micro(min(origin + each.end, begins[row + 1])))
                if end > begin:
                    which = {"step": step, "stage": each.stage, "micro": each.micro_batch}
                    place = {"pid": process, "tid": thread, "cat": "pass"}
                    yield _slice(each.kind, begin, end, which, **place)


def _names(
    devices: tuple[Device, ...], processes: dict[int, int], threads: list[int], training: int
) -> Iterator[Event]:
    yield _name("process_name", training, training, "training")
    hosts = {device.worker: device.host for device in devices}
    for worker, process in processes.items():
        host = f" ({hosts[worker]})" if hosts[worker] else ""
        yield _name("process_name", process, process, f"worker {worker}{host}")
    for device, thread in zip(devices, threads, strict=True):
        product = f" ({device.model})" if device.model else ""
        yield _name("thread_name", processes[device.worker], thread, f"{device.name}{product}")


def _name(kind: str, process: int, thread: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def _counters(
    devices: tuple[Device, ...], processes: dict[int, int], shares: Floats, begins: Floats
) -> Iterator[Event]:
    for index, device in enumerate(devices):
        column = shares[:, index]
        changed: Integers = np.flatnonzero(np.diff(column, prepend=-1.0))
        for row in changed.tolist():
            value = {"samples": float(column[row])}
            yield _counter(f"share {device.name}", processes[device.worker], begins[row], value)


def _speeds(training: int, shares: Floats, begins: Floats, every: Floats) -> Iterator[Event]:
    for row, seconds in enumerate(np.diff(begins).tolist()):
        if seconds > 0:
            speed = float(shares[row].sum() * every[row] / seconds)
            value = {"samples/s": speed if np.isfinite(speed) else 0.0}
            yield _counter("samples/s", training, begins[row], value)


def _slice(name: str, begin: float, end: float, arguments: Event, **place: Any) -> Event:
    duration = round(end - begin, 1)
    return {"ph": "X", "name": name, **place, "ts": begin, "dur": duration, "args": arguments}


def _counter(name: str, process: int, seconds: float, value: Event) -> Event:
    return {"ph": "C", "name": name, "pid": process, "ts": _micro(seconds), "args": value}


def _micro(seconds: float) -> float:
    return round(float(seconds) * _TO_MICROSECONDS, 1)
