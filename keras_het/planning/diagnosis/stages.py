"""What makes the steps of a model in stages long: devices do not do the same, nor get shares."""

from __future__ import annotations

import numpy as np

from keras_het.planning.diagnosis.causes import SILENT, Cause
from keras_het.planning.diagnosis.recording import Floats, PipelineRecord
from keras_het.planning.diagnosis.situation import Situation
from keras_het.planning.diagnosis.statistics import means

# Devices that are listed, times as long as predicted, an idle part.
_MOST_DEVICES = 6
_SLOWER = 1.25
_MUCH_IDLE = 0.2


def of_stages(
    situation: Situation, record: PipelineRecord
) -> tuple[tuple[str, ...], tuple[Cause, ...]]:
    """Return the lines of a verdict and its causes: only waiting for a batch is one."""
    parts = np.nan_to_num(means(situation.recent.input) / situation.step_seconds)
    worst = int(parts.argmax())
    worker, cost = situation.recording.devices[worst].worker, min(float(parts[worst]), 1.0)
    lines = tuple(_lines(situation, record))
    if cost < SILENT:
        return lines, ()
    text = f"worker {worker} waits for its batch in {100 * cost:.0f} % of each step."
    advice = "Add LoaderTuner, or see the guide on input pipelines."
    cause = Cause("input", (worst,), (worker,), cost, text, advice)
    return (f"{text} {advice}", *lines), (cause,)


def _lines(situation: Situation, record: PipelineRecord) -> list[str]:
    """Return where devices are idle, and which one is slower than planned."""
    recording = situation.recording
    rows = np.isin(recording.steps, situation.recent.numbers)
    compute, sync = means(recording.compute[rows]), means(recording.sync[rows])
    measured = sync / np.maximum(compute + sync, 1e-12)
    used = [device for stage in record.stages for device in stage.devices]
    names = [device.name for device in recording.devices]
    predicted = record.predicted
    if predicted is None or not predicted.step_seconds > 0:
        return [_idle_line({d: f"{names[d]} {100 * measured[d]:.0f} %" for d in used}, measured)]
    idle, busy = (
        np.array([seconds(device) for device in range(len(names))])
        for seconds in (predicted.idle_seconds, predicted.busy_seconds)
    )
    idle = idle / predicted.step_seconds
    texts = {
        d: f"{names[d]} {100 * idle[d]:.0f} % predicted, {100 * measured[d]:.0f} % measured"
        for d in used
    }
    lines = [_idle_line(texts, idle)]
    slower = {d: compute[d] / busy[d] for d in used if busy[d] > 0}
    worst = max(slower, key=lambda d: slower[d] if np.isfinite(slower[d]) else 0.0, default=None)
    if worst is not None and slower[worst] > _SLOWER:
        lines.append(
            f"{names[worst]} computes {compute[worst] * 1e3:.3g} ms of each step, "
            f"{busy[worst] * 1e3:.3g} ms were predicted: it is slower than when the plan was made. "
            "A new PipelineStrategy measures again."
        )
    return lines


def _idle_line(texts: dict[int, str], idle: Floats) -> str:
    """Return where devices are idle; shares follow from the plan, which is the place to look."""
    shown = sorted(texts, key=lambda d: -np.nan_to_num(idle[d]))[:_MOST_DEVICES]
    more = f" and {len(texts) - len(shown)} more" if len(texts) > len(shown) else ""
    is_idle = np.nanmax(idle[list(texts)], initial=0.0) > _MUCH_IDLE
    advice = "; a larger num_micro_batches reduces idle time." if is_idle else "."
    return (
        "The model is in stages. Parts of a step in which devices are idle: "
        f"{'; '.join(texts[d] for d in sorted(shown))}{more}. "
        f"Look at the plan (strategy.plan){advice}"
    )
