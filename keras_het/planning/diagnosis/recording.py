"""The times of a training's steps, and what is known of its devices: the input of a diagnosis."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from keras_het.planning.pipeline import Timeline

Floats = np.ndarray[Any, np.dtype[np.float64]]
Integers = np.ndarray[Any, np.dtype[np.int64]]
Booleans = np.ndarray[Any, np.dtype[np.bool_]]

_END = int(np.iinfo(np.int64).max)
PHASES = ("compute", "input", "sync", "other")
"""The four parts of a step's wall time, in the order of the log's rows."""

HARDWARE: Mapping[str, tuple[str, str]] = {
    "hw.gpu.utilization": ("1", "GPU: utilization"),
    "hw.gpu.memory.usage": ("By", "GPU: memory in use"),
    "hw.gpu.memory.limit": ("By", "GPU: memory"),
    "hw.power": ("W", "GPU: power"),
    "keras_het.gpu.power_limit": ("W", "GPU: power limit"),
    "hw.temperature": ("Cel", "GPU: temperature"),
    "keras_het.gpu.clock": ("Hz", "GPU: clock"),
    "keras_het.gpu.clock_limit": ("Hz", "GPU: highest clock"),
    "keras_het.gpu.throttle_reasons": ("", "GPU: throttle reasons (bit mask)"),
    "keras_het.cpu.budget": ("{cpu}", "Worker: CPUs it may use"),
    "keras_het.cpu.throttled": ("1", "Worker: time stopped by a CPU quota"),
    "keras_het.cpu.waiting": ("1", "Worker: time that a thread waits for a CPU"),
    "process.cpu.usage": ("{cpu}", "Worker: CPUs in use"),
    "process.memory.usage": ("By", "Worker: memory in use"),
    "process.disk.io": ("By/s", "Worker: disk traffic"),
    "system.cpu.utilization": ("1", "Host: CPU utilization"),
    "system.memory.usage": ("By", "Host: memory in use"),
    "system.memory.limit": ("By", "Host: memory"),
    "system.disk.io": ("By/s", "Host: disk traffic"),
    "system.network.io": ("By/s", "Host: network traffic"),
}
"""Sampled quantities, their units and titles; names are OpenTelemetry's, or begin with "keras_het".

Utilizations are between 0 and 1. `keras_het.cpu.budget` is the number of CPUs that the worker may
use (affinity and cgroup quota), `process.cpu.usage` the number that its process keeps busy,
`keras_het.cpu.waiting` the part of the time its most delayed thread spent waiting for a CPU,
`keras_het.cpu.throttled` the part of the time in which a cgroup quota stopped it, and
`keras_het.gpu.throttle_reasons` NVML's bit mask of clock event reasons. System values are the
machine's, or the cgroup's where it has a limit. All replicas of a worker have its process's values.
"""


@dataclasses.dataclass(frozen=True)
class Device:
    """The device of a replica; its identity stays when its process starts again, if it is known."""

    name: str
    worker: int
    kind: str = "CPU"
    host: str = ""
    model: str = ""
    identity: str = ""


@dataclasses.dataclass(frozen=True)
class Change:
    """A change that was made to a running training."""

    step: int
    kind: str
    text: str


@dataclasses.dataclass(frozen=True)
class Generation:
    """A part of a training with the same processes: its first step, and places of its devices."""

    step: int
    devices: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class StageRecord:
    """A stage of a model in stages: who has it."""

    layers: tuple[str, ...]
    devices: tuple[int, ...]
    micro_batches: tuple[int, ...]
    memory_bytes: tuple[float, ...] = ()
    recomputed: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class PipelineRecord:
    """The plan of a model in stages: who does what, and when, as predicted."""

    text: str
    stages: tuple[StageRecord, ...]
    predicted: Timeline | None = None


@dataclasses.dataclass(frozen=True)
class Recording:
    """Times of consecutive steps, of T rows and N replicas; NaN where a value is unknown.

    The four times of a replica add up to the wall time of its step. A row may stand for several
    steps (the median of each value) where old ones were thinned. Where only some steps were
    measured (`measured` of shape [T]; None: all), the others have the row of the next one that was.
    """

    devices: tuple[Device, ...]
    steps: Integers
    compute: Floats
    input: Floats
    sync: Floats
    other: Floats
    shares: Floats
    hardware: Mapping[str, Floats] = dataclasses.field(default_factory=dict)
    hardware_steps: Integers = dataclasses.field(default_factory=lambda: np.zeros(0, np.int64))
    changes: tuple[Change, ...] = ()
    pauses: tuple[tuple[int, float], ...] = ()
    pipeline: PipelineRecord | None = None
    measured: Booleans | None = None
    generations: tuple[Generation, ...] = ()
    """In the order of their steps; none if all steps are of the same one."""

    def __post_init__(self) -> None:
        expected = (len(self.steps), len(self.devices))
        for name in (*PHASES, "shares"):
            _check_shape(name, getattr(self, name), expected)
        expected = (len(self.hardware_steps), len(self.devices))
        for name, values in self.hardware.items():
            _check_shape(name, values, expected)

    @property
    def wall(self) -> Floats:
        return self.compute + self.input + self.sync + self.other

    @property
    def wall_of_all(self) -> Floats:
        """Wall times, with the mean of the others for devices that a generation has not."""
        wall = self.wall
        edges = np.searchsorted(self.steps, [*(each.step for each in self.generations), _END])
        for generation, (begin, end) in zip(
            self.generations, itertools.pairwise(edges.tolist()), strict=True
        ):
            absent = np.setdiff1d(np.arange(wall.shape[1]), generation.devices)
            others = wall[begin:end, list(generation.devices)]
            wall[begin:end, absent] = others.mean(axis=1, keepdims=True)
        return wall

    @property
    def samples(self) -> Floats:
        """Samples of each step, float64 of shape [T]: each stage of a pipeline takes all."""
        stages = 1 if self.pipeline is None else max(len(self.pipeline.stages), 1)
        return np.nansum(self.shares, axis=1) / stages

    def newest(self) -> tuple[Recording, list[int]]:
        """Return the newest generation with its own devices, and their places among all."""
        if not self.generations:
            return self, list(range(len(self.devices)))
        generation = self.generations[-1]
        part, columns = self.between(generation.step, _END), list(generation.devices)
        return dataclasses.replace(
            part,
            devices=tuple(self.devices[column] for column in columns),
            **{name: getattr(part, name)[:, columns] for name in (*PHASES, "shares")},
            hardware={name: values[:, columns] for name, values in part.hardware.items()},
            generations=(),
        ), columns

    def between(self, first: int, last: int) -> Recording:
        """Return the rows of some steps, with the hardware and the changes of that time."""
        rows = (self.steps >= first) & (self.steps < last)
        sampled = (self.hardware_steps >= first) & (self.hardware_steps < last)
        return dataclasses.replace(
            self,
            steps=self.steps[rows],
            **{name: getattr(self, name)[rows] for name in (*PHASES, "shares")},
            hardware={name: values[sampled] for name, values in self.hardware.items()},
            hardware_steps=self.hardware_steps[sampled],
            changes=tuple(each for each in self.changes if first <= each.step < last),
            pauses=tuple(each for each in self.pauses if first <= each[0] < last),
            measured=None if self.measured is None else self.measured[rows],
            generations=tuple(each for each in self.generations if each.step < last),
        )


def _check_shape(name: str, values: Floats, expected: tuple[int, int]) -> None:
    if np.shape(values) != expected:
        raise ValueError(
            f"{name} needs one row for each step or sample and one column for each device. "
            f"Received: shape {np.shape(values)}; expected: {expected}."
        )
