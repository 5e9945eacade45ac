"""The numbers of a report: what each device did in recent steps, and what each one costs."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from keras_het.launch.report.plain_text import number, percent, plain, plain_recording
from keras_het.planning.diagnosis.middles import checked, means
from keras_het.planning.diagnosis.recording import PHASES, Device, Floats, Integers, Recording
from keras_het.planning.diagnosis.scores import WINDOW
from keras_het.planning.diagnosis.steps import Throughput, throughput
from keras_het.planning.diagnosis.verdict import Verdict
from keras_het.planning.diagnosis.what_if import PHASE_REPAIRS
from keras_het.planning.pipeline import Timeline
from keras_het.tensorboard.diagnosis import Diagnosis, diagnosis_of
from keras_het.tensorboard.log_content import LogContent
from keras_het.tensorboard.pipeline_format import parse_timeline

MOST_NAMED = 3
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
class Repairs:
    """Predicted times of a step."""

    step_seconds: float
    worst: tuple[Repair, ...] = ()
    phases: tuple[Repair, ...] = ()
    even: Repair | None = None
    is_even: bool = False
    saved_by_device: Floats = dataclasses.field(default_factory=lambda: np.zeros(0))

    @property
    def gain(self) -> float:
        """How many times the samples/s of even shares the present ones bring; NaN if unknown."""
        return self.even.seconds / self.step_seconds if self.even else np.nan


@dataclasses.dataclass(frozen=True)
class WorkerExchanges:
    """The exchanges of an async worker, as it was heard of; NaN where a number was not logged."""

    worker: str
    number: int
    samples_per_second: float
    staleness: float
    most_staleness: float
    seconds: float
    last_step: int


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
    verdict: Verdict
    devices: tuple[DeviceFacts, ...]
    recent: tuple[int, int] | None
    speed: Throughput
    repairs: Repairs
    exchanges: tuple[WorkerExchanges, ...]
    messages: tuple[str, ...]
    plan: tuple[str, ...] = ()
    passes: tuple[tuple[int, Timeline], ...] = ()

    @property
    def num_steps(self) -> int:
        """Number of steps that the log tells of."""
        return int(self.every.sum())

    @property
    def of_recent(self) -> str:
        """Which steps the tables are about."""
        first, last = self.recent or (0, -1)
        which = f"steps {first} to {last}, without stalls" if last > first else f"step {first}"
        return which if last >= first else "no steps"

    def slowest_first(self) -> list[DeviceFacts]:
        """Return the replicas whose repair would save most, first of all."""
        saved = np.nan_to_num(self.repairs.saved_by_device)
        order = np.argsort(-saved, kind="stable") if len(saved) else range(len(self.devices))
        return [self.devices[index] for index in order]


def facts_of(run: str, content: LogContent) -> Facts:
    """Return the numbers of a training's log.

    Recent steps are those that the verdict is about: the latest ones with the present shares and
    the present speed.
    """
    recording = plain_recording(content.recording)
    diagnosis = diagnosis_of(recording)
    with np.errstate(all="ignore"):
        rows = np.flatnonzero(np.isin(recording.steps, diagnosis.recent.numbers))
        if not len(rows):
            rows = np.arange(len(recording.steps))[-WINDOW:]
        numbers = recording.steps[rows]
        return Facts(
            plain(run),
            recording,
            content.every,
            diagnosis.verdict,
            _devices(recording, rows, diagnosis),
            (int(numbers[0]), int(numbers[-1])) if len(numbers) else None,
            throughput(recording.wall, recording.samples, content.every),
            _repairs(recording, diagnosis),
            _exchanges(content.exchanges),
            tuple(plain(message) for message in content.messages),
            _plan_lines(recording),
            tuple(_passes(content)),
        )


def _passes(content: LogContent) -> Iterator[tuple[int, Timeline]]:
    for step, text in content.passes:
        with contextlib.suppress(ValueError):  # damaged
            timeline = parse_timeline(text)
            if len(timeline.events) == len(content.recording.devices):
                yield step, timeline


def _plan_lines(recording: Recording) -> tuple[str, ...]:
    text = "" if recording.pipeline is None else recording.pipeline.text
    return tuple(plain(line) for line in text.splitlines()[:_MOST_LINES])


def _devices(recording: Recording, rows: Integers, diagnosis: Diagnosis) -> tuple[DeviceFacts, ...]:
    phases = [means(checked(getattr(recording, name)[rows])) for name in PHASES]
    shares = means(checked(recording.shares[rows], np.inf))
    speed: Floats = np.where(phases[0] > 0, shares / phases[0], np.nan)
    speed = np.where(shares > 0, speed, np.nan)
    hardware = hardware_texts(recording)
    return tuple(
        DeviceFacts(
            index,
            device,
            float(shares[index]),
            float(speed[index]),
            tuple(float(values[index]) for values in phases),
            float(diagnosis.against_best[index]),
            float(diagnosis.against_own_best[index]),
            hardware[index],
        )
        for index, device in enumerate(recording.devices)
    )


def _repairs(recording: Recording, diagnosis: Diagnosis) -> Repairs:
    """Name what a step would take with each trouble repaired."""
    costs, recent = diagnosis.costs, diagnosis.recent
    if costs is None:
        return Repairs(np.nan)
    now = costs.step_seconds

    def repair(name: str, seconds: float) -> Repair:
        return Repair(name, seconds, 1.0 - seconds / now)

    names = [device.name for device in recording.devices]
    of_devices = [
        repair(f"{name} not slow", float(seconds))
        for name, seconds in zip(names, costs.by_device, strict=True)
    ]
    workers = [device.worker for device in recording.devices]
    of_workers = [
        repair(f"worker {worker} not slow", seconds)
        for worker, seconds in costs.by_worker.items()
        if workers.count(worker) > 1 and len(costs.by_worker) > 1
    ]
    even_shares = recent.shares.sum(axis=1, keepdims=True) / len(names)
    # The last samples of a batch that cannot be divided evenly go somewhere.
    is_even = bool((np.abs(recent.shares - even_shares) <= 1.0).all())
    known = len(names) > 1 and bool(np.isfinite(recording.shares).any())
    return Repairs(
        now,
        (*_worst(of_devices), *_worst(of_workers)),
        tuple(repair(text, costs.by_phase[name]) for name, text in PHASE_REPAIRS.items()),
        repair("even shares", diagnosis.even_seconds) if known else None,
        is_even and known,
        now - costs.by_device,
    )


def _worst(repairs: list[Repair]) -> list[Repair]:
    saving = [each for each in repairs if each.saved > _LEAST_SAVED]
    return sorted(saving, key=lambda each: each.seconds)[:MOST_NAMED]


def _exchanges(entries: Iterable[Mapping[str, Any]]) -> tuple[WorkerExchanges, ...]:
    """Put the exchanges of each worker together, sorted by worker."""
    by_worker: dict[str, list[Mapping[str, Any]]] = {}
    for each in entries:
        by_worker.setdefault(plain(str(each.get("worker", "?"))), []).append(each)
    found = []
    for worker in sorted(by_worker, key=lambda name: (len(name), name)):
        of_worker = by_worker[worker]
        staleness = _numbers(of_worker, "staleness")
        found.append(
            WorkerExchanges(
                worker,
                len(of_worker),
                _median(_numbers(of_worker, "samples_per_second")),
                _median(staleness),
                max(staleness, default=np.nan),
                _median(_numbers(of_worker, "exchange_seconds")),
                max(int(each.get("step", 0)) for each in of_worker),
            )
        )
    return tuple(found)


def _numbers(entries: list[Mapping[str, Any]], name: str) -> list[float]:
    values = (each.get(name) for each in entries)
    return [
        float(value)
        for value in values
        if isinstance(value, (int, float))
        and not isinstance(value, bool)
        and abs(value) < _LARGEST  # NaN is not, nor is a whole number that has no float
    ]


def _median(values: list[float]) -> float:
    return float(np.median(values)) if values else np.nan


def hardware_texts(recording: Recording) -> list[str]:
    """Return what is known of each device's hardware; empty texts where nothing is."""
    last = {name: _last_known(np.asarray(v)) for name, v in recording.hardware.items()}
    return [
        _text({name: values[index] for name, values in last.items() if np.isfinite(values[index])})
        for index in range(len(recording.devices))
    ]


def _last_known(values: Floats) -> list[float]:
    if not len(values):
        return [np.nan] * values.shape[1]
    known = np.isfinite(values)
    rows = len(values) - 1 - known[::-1].argmax(axis=0)
    latest = values[rows, np.arange(values.shape[1])]  # infinite or NaN where none is known
    return [float(value) for value in latest]


def _text(known: Mapping[str, float]) -> str:
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
