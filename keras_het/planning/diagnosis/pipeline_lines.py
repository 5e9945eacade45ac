"""What can be said of a model in stages: where its devices are idle, against what the plan says."""

from __future__ import annotations

import numpy as np

from keras_het.planning.diagnosis.middles import means
from keras_het.planning.diagnosis.pipeline_record import PipelineRecord
from keras_het.planning.diagnosis.recording import Floats, Recording
from keras_het.planning.diagnosis.windows import Windows

_MOST_DEVICES = 6
_SLOWER = 1.25
_MUCH_IDLE = 0.2


def input_parts(windows: Windows) -> Floats:
    """Return the part of recent steps that each device waits for its batch, float64 [N]."""
    parts: Floats = means(windows.recent.input) / windows.recent.mean(windows.recent.seconds)
    return parts


def pipeline_lines(
    recording: Recording, record: PipelineRecord, windows: Windows
) -> tuple[str, ...]:
    """Return the lines of a verdict: shares follow from the plan, which is the place to look."""
    rows = np.isin(recording.steps, windows.recent.numbers)
    compute, sync = means(recording.compute[rows]), means(recording.sync[rows])
    measured = sync / np.maximum(compute + sync, 1e-12)
    used = [device for stage in record.stages for device in stage.devices]
    names = [device.name for device in recording.devices]
    predicted = record.predicted
    if predicted is None or not predicted.step_seconds > 0:
        idle = {d: f"{names[d]} {_percent(measured[d])}" for d in used}
        return (f"{_start(idle, used, measured)}. {_advice(measured[used])}",)
    expected = np.array([predicted.idle_seconds(d) for d in range(len(names))])
    expected = expected / predicted.step_seconds
    idle = {
        d: f"{names[d]} {_percent(expected[d])} predicted, {_percent(measured[d])} measured"
        for d in used
    }
    lines = [f"{_start(idle, used, expected)}. {_advice(expected[used])}"]
    busy = np.array([predicted.busy_seconds(d) for d in range(len(names))])
    slower = {d: compute[d] / busy[d] for d in used if busy[d] > 0}
    worst = max(slower, key=lambda d: slower[d] if np.isfinite(slower[d]) else 0.0, default=None)
    if worst is not None and slower[worst] > _SLOWER:
        lines.append(
            f"{names[worst]} computes {compute[worst] * 1e3:.3g} ms of each step, "
            f"{busy[worst] * 1e3:.3g} ms were predicted: it is slower than when the plan was made. "
            "A new PipelineStrategy measures again."
        )
    return tuple(lines)


def _start(idle: dict[int, str], used: list[int], parts: Floats) -> str:
    shown = sorted(used, key=lambda d: -np.nan_to_num(parts[d]))[:_MOST_DEVICES]
    more = f" and {len(used) - len(shown)} more" if len(used) > len(shown) else ""
    listed = "; ".join(idle[d] for d in sorted(shown))
    return f"The model is in stages. Parts of a step in which devices are idle: {listed}{more}"


def _advice(parts: Floats) -> str:
    if np.nanmax(parts, initial=0.0) > _MUCH_IDLE:
        return "Look at the plan (strategy.plan); more micro_batches idle less."
    return "Look at the plan (strategy.plan)."


def _percent(part: float) -> str:
    return f"{100 * part:.0f} %"
