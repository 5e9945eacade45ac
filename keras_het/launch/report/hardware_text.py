"""The last known samples of each device's hardware, in words."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from keras_het.launch.report.plain_text import number, percent
from keras_het.planning.diagnosis.recording import Floats, Recording

_GIGA = 1e9
_MEGA = 1e6
_THROTTLED = 0.01


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
