"""What the tab can draw of a training: quantities with their titles, units and values."""

from __future__ import annotations

import dataclasses

import numpy as np

from keras_het.planning.diagnosis.recording import HARDWARE, PHASES, Floats, Integers
from keras_het.tensorboard.log_content import LogContent
from keras_het.tensorboard.log_format import ROWS

_TIMES = {
    "wall": "Wall time of a step",
    "compute": "Compute time",
    "input": "Input wait",
    "sync": "Sync wait",
    "other": "Other time",
    "seconds_per_sample": "Compute time a sample",
}
_HARDWARE = {
    "hw.gpu.utilization": "GPU: utilization",
    "hw.gpu.memory.usage": "GPU: memory in use",
    "hw.gpu.memory.limit": "GPU: memory",
    "hw.power": "GPU: power",
    "keras_het.gpu.power_limit": "GPU: power limit",
    "hw.temperature": "GPU: temperature",
    "keras_het.gpu.clock": "GPU: clock",
    "keras_het.gpu.clock_limit": "GPU: highest clock",
    "keras_het.gpu.throttle_reasons": "GPU: throttle reasons (bit mask)",
    "keras_het.cpu.budget": "Worker: CPUs it may use",
    "keras_het.cpu.throttled": "Worker: time stopped by a CPU quota",
    "process.cpu.usage": "Worker: CPUs in use",
    "process.memory.usage": "Worker: memory in use",
    "process.disk.io": "Worker: disk traffic",
    "system.cpu.utilization": "Host: CPU utilization",
    "system.memory.usage": "Host: memory in use",
    "system.memory.limit": "Host: memory",
    "system.disk.io": "Host: disk traffic",
    "system.network.io": "Host: network traffic",
}


@dataclasses.dataclass(frozen=True)
class Quantity:
    """A quantity that can be drawn."""

    name: str
    title: str
    unit: str


@dataclasses.dataclass(frozen=True)
class Series:
    """Values of a quantity."""

    steps: Integers
    every: Integers
    middle: Floats
    highest: Floats


def quantities(content: LogContent) -> list[Quantity]:
    """Return what there are values of."""
    found = [Quantity(name, title, "s") for name, title in _TIMES.items()]
    found.append(Quantity("share", "Share of the global batch", "samples"))
    for name, values in content.recording.hardware.items():
        if np.any(np.isfinite(values)):
            found.append(Quantity(name, _HARDWARE.get(name, name), HARDWARE.get(name, "")))
    return found


def series(content: LogContent, name: str) -> Series | None:
    """Return the values of a quantity, None if there is no such quantity."""
    recording = content.recording
    if name in recording.hardware:
        values = recording.hardware[name]
        # A sample stands for the steps up to the next one.
        steps = recording.hardware_steps
        end = int(recording.steps[-1] + content.every[-1]) if len(recording.steps) else 0
        every = np.diff(np.append(steps, max(end, int(steps[-1]) + 1) if len(steps) else end))
        return Series(steps, every, values, values)
    if name == "wall":
        middle, highest = recording.wall, np.sum(content.highest[:, : len(PHASES)], axis=1)
        # The phases' highest values are of different steps: their sum is no step's.
        highest = np.where(content.every[:, None] == 1, highest, middle)
    elif name == "seconds_per_sample":
        shares = np.where(recording.shares > 0, recording.shares, np.nan)
        middle = recording.compute / shares
        highest = content.highest[:, ROWS.index("compute")] / shares
    elif name in ROWS:
        middle = recording.shares if name == "share" else getattr(recording, name)
        highest = content.highest[:, ROWS.index(name)]
    else:
        return None
    return Series(recording.steps, content.every, middle, highest)
