"""The numbers of a report: what each device did in recent steps, and what each one costs."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import numpy as np

from keras_het.launch.report.exchanges import WorkerExchanges, worker_exchanges
from keras_het.launch.report.hardware_text import hardware_texts
from keras_het.launch.report.plain_text import plain, plain_recording
from keras_het.launch.report.repairs import Repairs, repairs_of
from keras_het.planning.diagnosis.middles import checked, means
from keras_het.planning.diagnosis.recording import PHASES, Device, Floats, Integers, Recording
from keras_het.planning.diagnosis.scores import WINDOW, scores
from keras_het.planning.diagnosis.steps import choose_windows, throughput
from keras_het.planning.diagnosis.verdict import Verdict, diagnose
from keras_het.planning.pipeline import Timeline
from keras_het.tensorboard.log_content import LogContent
from keras_het.tensorboard.pipeline_format import parse_timeline

_MOST_LINES = 200


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
    step_seconds: float
    median_seconds: float
    samples_per_second: float
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
    with np.errstate(all="ignore"):
        windows = choose_windows(recording, WINDOW)
        rows = np.flatnonzero(np.isin(recording.steps, windows.recent.numbers))
        if not len(rows):
            rows = np.arange(len(recording.steps))[-WINDOW:]
        repairs = repairs_of(recording, windows.recent)
        devices = _devices(recording, rows)
        numbers = recording.steps[rows]
        speed = throughput(recording.wall, recording.samples, content.every)
        return Facts(
            plain(run),
            recording,
            content.every,
            diagnose(recording),
            devices,
            (int(numbers[0]), int(numbers[-1])) if len(numbers) else None,
            speed.step_seconds,
            speed.median_seconds,
            speed.samples_per_second,
            repairs,
            worker_exchanges(content.exchanges),
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


def _devices(recording: Recording, rows: Integers) -> tuple[DeviceFacts, ...]:
    phases = [means(checked(getattr(recording, name)[rows])) for name in PHASES]
    shares = means(checked(recording.shares[rows], np.inf))
    speed: Floats = np.where(phases[0] > 0, shares / phases[0], np.nan)
    speed = np.where(shares > 0, speed, np.nan)
    best, own_best = scores(recording)
    hardware = hardware_texts(recording)
    return tuple(
        DeviceFacts(
            index,
            device,
            float(shares[index]),
            float(speed[index]),
            tuple(float(values[index]) for values in phases),
            float(best[index]),
            float(own_best[index]),
            hardware[index],
        )
        for index, device in enumerate(recording.devices)
    )
