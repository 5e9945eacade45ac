"""The numbers of a report: what each device did in recent steps, and what each one costs."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from keras_het.launch.report.plain_text import (
    count,
    milliseconds,
    number,
    percent,
    plain,
    plain_recording,
)
from keras_het.planning.diagnosis.middles import checked, means
from keras_het.planning.diagnosis.recording import PHASES, Device, Floats, Integers, Recording
from keras_het.planning.diagnosis.scores import WINDOW
from keras_het.planning.diagnosis.steps import Throughput, throughput
from keras_het.planning.diagnosis.what_if import PHASE_REPAIRS
from keras_het.planning.pipeline import Timeline
from keras_het.tensorboard.log_content import LogContent
from keras_het.tensorboard.log_format import parse_timeline
from keras_het.tensorboard.views import Diagnosis, diagnosis_of

_MOST_NAMED = 3
# What saves less than this part of a step is noise.
_LEAST_SAVED = 0.01
_MOST_LINES = 200
_LARGEST = 1e18
_GIGA, _MEGA = 1e9, 1e6
_THROTTLED = 0.01


@dataclasses.dataclass(frozen=True)
class Repair:
    """A step with something repaired."""

    name: str
    seconds: float
    saved: float


@dataclasses.dataclass(frozen=True)
class DeviceFacts:
    """A replica in recent steps; NaN where a number is unknown."""

    index: int
    device: Device
    share: float
    samples_per_second: float
    phases: tuple[float, ...]
    best: float
    own_best: float
    hardware: str

    @property
    def fractions(self) -> tuple[float, ...]:
        """Parts of its step's wall time, of each of `PHASES`."""
        total = float(np.nansum(self.phases))
        return tuple(seconds / total if total > 0 else np.nan for seconds in self.phases)


@dataclasses.dataclass(frozen=True)
class Facts:
    """Everything that a report shows."""

    run: str
    recording: Recording
    every: Integers
    diagnosis: Diagnosis
    devices: tuple[DeviceFacts, ...]
    recent: tuple[int, int] | None
    speed: Throughput
    worst: tuple[Repair, ...]
    phases: tuple[Repair, ...]
    is_even: bool | None
    exchanges: tuple[str, ...]
    messages: tuple[str, ...]
    plan: tuple[str, ...] = ()
    passes: tuple[tuple[int, Timeline], ...] = ()

    @property
    def num_steps(self) -> int:
        return int(self.every.sum())

    @property
    def of_recent(self) -> str:
        first, last = self.recent or (0, -1)
        which = f"steps {first} to {last}, without stalls" if last > first else f"step {first}"
        return which if last >= first else "no steps"

    def slowest_first(self) -> list[DeviceFacts]:
        """Return the replicas whose repair would save most, first of all."""
        costs = self.diagnosis.costs
        if costs is None:
            return list(self.devices)
        saved = np.nan_to_num(costs.step_seconds - costs.by_device)
        return sorted(self.devices, key=lambda device: -saved[device.index])


def facts_of(run: str, content: LogContent) -> Facts:
    """Return the numbers of a log; recent steps are those that the verdict is about."""
    recording = plain_recording(content.recording)
    diagnosis = diagnosis_of(recording)
    with np.errstate(all="ignore"):
        rows = np.flatnonzero(np.isin(recording.steps, diagnosis.recent.numbers))
        if not len(rows):
            rows = np.arange(len(recording.steps))[-WINDOW:]
        places = set(recording.newest()[1])
        devices = _devices(recording, rows, diagnosis)
        devices = tuple(device for device in devices if device.index in places)
        speed = throughput(recording.wall_of_all, recording.samples, content.every)
    numbers = recording.steps[rows]
    plan = "" if recording.pipeline is None else recording.pipeline.text
    worst, phases = _repairs(recording, diagnosis)
    return Facts(
        plain(run),
        recording,
        content.every,
        diagnosis,
        devices,
        recent=(int(numbers[0]), int(numbers[-1])) if len(numbers) else None,
        speed=speed,
        worst=worst,
        phases=phases,
        is_even=_is_even(recording, diagnosis),
        exchanges=tuple(_exchange_lines(content.exchanges)),
        messages=tuple(plain(message) for message in content.messages),
        plan=tuple(plain(line) for line in plan.splitlines()[:_MOST_LINES]),
        passes=tuple(_passes(content)),
    )


def _passes(content: LogContent) -> Iterator[tuple[int, Timeline]]:
    for step, text in content.passes:
        with contextlib.suppress(ValueError):  # damaged
            timeline = parse_timeline(text)
            if len(timeline.events) == len(content.recording.devices):
                yield step, timeline


def _devices(recording: Recording, rows: Integers, diagnosis: Diagnosis) -> tuple[DeviceFacts, ...]:
    phases = [means(checked(getattr(recording, name)[rows])) for name in PHASES]
    shares = means(checked(recording.shares[rows], np.inf))
    speed: Floats = np.where(phases[0] > 0, shares / phases[0], np.nan)
    speed = np.where(shares > 0, speed, np.nan)
    known = {name: _last_known(np.asarray(v)) for name, v in recording.hardware.items()}
    return tuple(
        DeviceFacts(
            index,
            device,
            float(shares[index]),
            float(speed[index]),
            tuple(float(values[index]) for values in phases),
            float(diagnosis.against_best[index]),
            float(diagnosis.against_own_best[index]),
            _hardware({name: v[index] for name, v in known.items() if np.isfinite(v[index])}),
        )
        for index, device in enumerate(recording.devices)
    )


def _repairs(recording: Recording, diagnosis: Diagnosis) -> tuple[tuple[Repair, ...], ...]:
    """Name what a step would take with the worst devices and workers repaired, and each phase."""
    costs = diagnosis.costs
    if costs is None:
        return (), ()
    now = costs.step_seconds

    def repair(name: str, seconds: float) -> Repair:
        return Repair(name, seconds, 1.0 - seconds / now)

    workers = [device.worker for device in recording.devices]
    of_devices = [
        repair(f"{device.name} not slow", float(seconds))
        for device, seconds in zip(recording.devices, costs.by_device, strict=True)
    ]
    of_workers = [
        repair(f"worker {worker} not slow", seconds)
        for worker, seconds in costs.by_worker.items()
        if workers.count(worker) > 1 and len(costs.by_worker) > 1
    ]
    phases = tuple(repair(text, costs.by_phase[name]) for name, text in PHASE_REPAIRS.items())
    return (*_worst(of_devices), *_worst(of_workers)), phases


def _is_even(recording: Recording, diagnosis: Diagnosis) -> bool | None:
    """Tell whether shares are even; None where that says nothing."""
    shares = diagnosis.recent.shares
    if diagnosis.costs is None or shares.shape[1] < 2 or not np.isfinite(recording.shares).any():
        return None
    # The last samples of a batch that cannot be divided evenly go somewhere.
    return bool((np.abs(shares - shares.mean(axis=1, keepdims=True)) <= 1.0).all())


def _worst(repairs: list[Repair]) -> list[Repair]:
    saving = [each for each in repairs if each.saved > _LEAST_SAVED]
    return sorted(saving, key=lambda each: each.seconds)[:_MOST_NAMED]


def _exchange_lines(entries: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    by_worker: dict[str, list[Mapping[str, Any]]] = {}
    for each in entries:
        by_worker.setdefault(plain(str(each.get("worker", "?"))), []).append(each)
    for worker, of_worker in sorted(by_worker.items(), key=lambda item: (len(item[0]), item[0])):
        known = []
        if speeds := _numbers(of_worker, "samples_per_second"):
            known.append(f"{number(np.median(speeds))} samples/s")
        if ages := _numbers(of_worker, "staleness"):
            middle, most = number(np.median(ages)), number(max(ages))
            known.append(f"staleness {middle} in the middle, {most} at most")
        if seconds := _numbers(of_worker, "exchange_seconds"):
            known.append(f"{milliseconds(np.median(seconds))} ms an exchange")
        last = max(int(each.get("step", 0)) for each in of_worker)
        known.append(f"heard of {count(len(of_worker), 'time')}, last at step {last}")
        yield f"async worker {worker}: {', '.join(known)}"


def _numbers(entries: Iterable[Mapping[str, Any]], name: str) -> list[float]:
    values = (each.get(name) for each in entries)
    return [
        float(value)
        for value in values
        if isinstance(value, (int, float))
        and not isinstance(value, bool)
        and abs(value) < _LARGEST  # NaN is not, nor is a whole number that has no float
    ]


def _last_known(values: Floats) -> list[float]:
    if not len(values):
        return [np.nan] * values.shape[1]
    known = np.isfinite(values)
    rows = len(values) - 1 - known[::-1].argmax(axis=0)
    latest = values[rows, np.arange(values.shape[1])]  # infinite or NaN where none is known
    return [float(value) for value in latest]


def _hardware(known: Mapping[str, float]) -> str:
    parts = []
    if "hw.gpu.utilization" in known:
        parts.append(f"GPU {percent(known['hw.gpu.utilization'])}")
    if "hw.gpu.memory.usage" in known:
        parts.append(f"{_of(known, 'hw.gpu.memory.usage', 'hw.gpu.memory.limit', _GIGA)} GB")
    if "hw.power" in known:
        parts.append(f"{_of(known, 'hw.power', 'keras_het.gpu.power_limit', 1.0)} W")
    if "hw.temperature" in known:
        parts.append(f"{number(known['hw.temperature'])} °C")
    if "keras_het.gpu.clock" in known:
        clock = _of(known, "keras_het.gpu.clock", "keras_het.gpu.clock_limit", _MEGA)
        parts.append(f"{clock} MHz")
    if "process.cpu.usage" in known:
        used = {**known, "process.cpu.usage": round(known["process.cpu.usage"], 2)}
        unit = "CPU" if known.get("keras_het.cpu.budget") == 1 else "CPUs"
        parts.append(f"{_of(used, 'process.cpu.usage', 'keras_het.cpu.budget', 1.0)} {unit}")
    if known.get("keras_het.cpu.throttled", 0.0) >= _THROTTLED:
        parts.append(f"CPU quota stops it {percent(known['keras_het.cpu.throttled'])} of the time")
    if "system.cpu.utilization" in known:
        parts.append(f"host {percent(known['system.cpu.utilization'])} busy")
    return ", ".join(parts)


def _of(known: Mapping[str, float], used: str, limit: str, unit: float) -> str:
    text = number(known[used] / unit)
    return f"{text} of {number(known[limit] / unit)}" if limit in known else text
