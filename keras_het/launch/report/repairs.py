"""What a step would take if a device, a worker or a phase was not slow, or shares were even."""

from __future__ import annotations

import dataclasses

import numpy as np

from keras_het.planning.diagnosis.recording import Floats, Recording
from keras_het.planning.diagnosis.scores import device_lines
from keras_het.planning.diagnosis.steps import Steps
from keras_het.planning.diagnosis.what_if import (
    PHASE_REPAIRS,
    seconds_with_shares,
    what_if_of_steps,
)

MOST_NAMED = 3
# What saves less than this part of a step is noise.
_LEAST_SAVED = 0.01


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


def repairs_of(recording: Recording, steps: Steps) -> Repairs:
    """Predict the time of some steps with each trouble repaired."""
    if not len(steps.numbers) or not steps.mean(steps.seconds) > 0:
        return Repairs(np.nan)
    if recording.pipeline is not None:  # steps do not wait for the slowest replica
        return Repairs(np.nan)
    lines = device_lines(recording, steps)
    result = what_if_of_steps(steps, lines, recording.devices)
    now = result.step_seconds

    def repair(name: str, seconds: float) -> Repair:
        return Repair(name, seconds, 1.0 - seconds / now)

    names = [device.name for device in recording.devices]
    of_devices = [
        repair(f"{name} not slow", float(seconds))
        for name, seconds in zip(names, result.by_device, strict=True)
    ]
    workers = [device.worker for device in recording.devices]
    of_workers = [
        repair(f"worker {worker} not slow", seconds)
        for worker, seconds in result.by_worker.items()
        if workers.count(worker) > 1 and len(result.by_worker) > 1
    ]
    total = steps.shares.sum(axis=1, keepdims=True)
    even_shares = np.broadcast_to(total / len(names), steps.shares.shape)
    # The last samples of a batch that cannot be divided evenly go somewhere.
    is_even = bool((np.abs(steps.shares - even_shares) <= 1.0).all())
    known = len(names) > 1 and bool(np.isfinite(recording.shares).any())
    return Repairs(
        now,
        (*_worst(of_devices), *_worst(of_workers)),
        tuple(repair(text, result.by_phase[name]) for name, text in PHASE_REPAIRS.items()),
        repair("even shares", seconds_with_shares(steps, lines, even_shares)) if known else None,
        is_even and known,
        now - result.by_device,
    )


def _worst(repairs: list[Repair]) -> list[Repair]:
    saving = [each for each in repairs if each.saved > _LEAST_SAVED]
    return sorted(saving, key=lambda each: each.seconds)[:MOST_NAMED]
