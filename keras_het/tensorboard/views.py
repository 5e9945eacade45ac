"""What the tab shows of a training, as plain values for JSON; all limits on their size are here."""

from __future__ import annotations

import base64
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from keras_het.planning.diagnosis.recording import HARDWARE, PHASES, Floats, Integers, Recording
from keras_het.planning.diagnosis.situation import Situation
from keras_het.planning.diagnosis.statistics import throughput
from keras_het.planning.diagnosis.verdict import diagnose
from keras_het.planning.diagnosis.what_if import gain_over_even, what_if
from keras_het.planning.pipeline import Timeline
from keras_het.tensorboard.log_content import LogContent, windows
from keras_het.tensorboard.log_format import ROWS, parse_timeline, timeline_values

MOST_COLUMNS, MOST_ROWS = 600, 200
MOST_LANES, LANE_COLUMNS = 24, 300
_MOST_ROWS_FOR_MEDIANS = 1_000
_MEANS = (*PHASES, "shares")
_MOST_CHANGES, _MOST_EXCHANGES = 500, 500
_MOST_PASSES = 10_000
HOW = ("median", "highest")
"""What a heat map can show of the steps of a column, and of the replicas of a row."""

_TIMES = {
    "wall": "Wall time of a step",
    "compute": "Compute time",
    "input": "Input wait",
    "sync": "Sync wait",
    "other": "Other time",
    "seconds_per_sample": "Compute time a sample",
}


def between(content: LogContent, first: int | None, last: int | None) -> LogContent:
    if first is None and last is None:
        return content
    begin = first if first is not None else 0
    end = last if last is not None else int(np.iinfo(np.int64).max)
    steps = content.recording.steps
    rows = (steps >= begin) & (steps < end)
    if not rows.any() and len(steps):
        # Inside the steps that one row of old steps stands for.
        row = max(int(np.searchsorted(steps, begin, "right")) - 1, 0)
        begin, end = min(begin, int(steps[row])), max(end, int(steps[row]) + 1)
        rows = (steps >= begin) & (steps < end)
    return dataclasses.replace(
        content,
        recording=content.recording.between(begin, end),
        every=content.every[rows],
        highest=content.highest[rows],
        windows=None if content.windows is None else content.windows[rows],
        exchanges=tuple(each for each in content.exchanges if begin <= each["step"] < end),
        passes=tuple(each for each in content.passes if begin <= each[0] < end) or content.passes,
    )


def span(content: LogContent) -> tuple[int, int]:
    """Return the first step of a training and the step after its last one; 0, 0 without steps."""
    steps = content.recording.steps
    return (int(steps[0]), int(steps[-1] + content.every[-1])) if len(steps) else (0, 0)


def overview(whole: LogContent, content: LogContent) -> dict[str, Any]:
    """Return devices with their means, changes and exchanges of a part of a training."""
    recording = content.recording
    first, last = span(content)
    # what can be chosen must not change with the zoom
    first_of_all, last_of_all = span(whole)
    rows = np.arange(len(recording.steps))[
        :: max(len(recording.steps) // _MOST_ROWS_FOR_MEDIANS, 1)
    ]
    speed = throughput(recording.wall_of_all, recording.samples, content.every)
    return {
        "first": first,
        "last": last,
        "first_of_all": first_of_all,
        "last_of_all": last_of_all,
        "thinned": bool(np.any(content.every > 1)),
        "measured": None if recording.measured is None else int(recording.measured.sum()),
        **{name: _number(value) for name, value in dataclasses.asdict(speed).items()},
        "pauses": len(recording.pauses),
        "pause_seconds": _number(sum(seconds for _, seconds in recording.pauses)),
        "devices": _devices(content, rows),
        "quantities": [
            {"name": name, "title": title, "unit": unit}
            for name, title, unit in _quantities(recording)
        ],
        "pipeline": recording.pipeline is not None,
        "changes": [dataclasses.asdict(each) for each in recording.changes[-_MOST_CHANGES:]],
        "exchanges": list(content.exchanges[-_MOST_EXCHANGES:]),
    }


def diagnosis(content: LogContent) -> dict[str, Any]:
    """Return who is slow and why, what that costs, two scores and what balancing has gained."""
    recording = content.recording
    if not len(recording.steps):
        return {"verdict": [], "missing": [], "what_if": None, "scores": None, "gain": None}
    newest, places = recording.newest()

    def of_all(values: Floats) -> list[float | None]:
        found = np.full(len(recording.devices), np.nan)
        found[places] = values
        return _numbers(found)

    with np.errstate(all="ignore"):
        verdict = diagnose(newest)
        situation = Situation(newest)
        best, own_best = of_all(situation.best), of_all(situation.own_best)
        costs, gain = None, np.nan
        # steps of a model in stages do not wait for the slowest replica
        if newest.pipeline is None and situation.step_seconds > 0:
            costs, gain = what_if(situation), gain_over_even(situation)
    missing = [str(reason) for reason in verdict.missing]
    if len(recording.generations) > 1 and not verdict.lines:
        step = recording.generations[-1].step
        missing = [f"{reason} (since the restart in step {step})" for reason in missing]
    return {
        "verdict": [str(line) for line in verdict.lines],
        "missing": missing,
        "what_if": costs
        and {
            "steps": [int(each) for each in situation.recent.numbers[[0, -1]]],
            "step_seconds": _number(costs.step_seconds),
            "by_device": of_all(costs.by_device),
            "by_worker": {str(name): _number(value) for name, value in costs.by_worker.items()},
            "by_phase": {str(name): _number(value) for name, value in costs.by_phase.items()},
        },
        "scores": {"against_best": best, "against_own_best": own_best},
        "gain": _number(gain),
    }


def pipeline(content: LogContent) -> dict[str, Any]:
    """Return the plan of a model in stages, and the passes of one step, predicted and measured."""
    recording, record = content.recording, content.recording.pipeline
    names = [device.name for device in recording.devices]
    if record is None:
        return {"text": "", "stages": [], "devices": names, "predicted": None, "measured": None}
    latest = next(measured_timeline(content), None)
    return {
        "text": record.text,
        "stages": [dataclasses.asdict(stage) for stage in record.stages],
        "devices": names,
        "predicted": None if record.predicted is None else _timeline(record.predicted),
        "measured": latest and {"step": latest[0], **_timeline(latest[1])},
    }


def measured_timeline(content: LogContent) -> Iterator[tuple[int, Timeline]]:
    """Yield steps and their passes, the latest first."""
    for step, text in reversed(content.passes):
        yield step, parse_timeline(text)


def _timeline(timeline: Timeline) -> dict[str, Any]:
    """Return events, as many of each device as the page can draw, and idle times of all."""
    devices = range(len(timeline.events))
    most = max(_MOST_PASSES // max(len(devices), 1), 1)
    events = tuple(of_device[:most] for of_device in timeline.events)
    return {
        **timeline_values(dataclasses.replace(timeline, events=events)),
        "idle": [_number(max(timeline.idle_seconds(device), 0.0)) for device in devices],
        "cut": any(len(of_device) > most for of_device in timeline.events),
    }


def _devices(content: LogContent, rows: np.ndarray) -> list[dict[str, Any]]:
    recording = content.recording
    with np.errstate(all="ignore"):
        means = {name: _means(getattr(recording, name), content.every) for name in _MEANS}
        shares = recording.shares[rows]
        seconds = recording.compute[rows] / np.where(shares > 0, shares, np.nan)
        per_sample = _middle(seconds)
        spread = _high(seconds) / per_sample
    return [
        {
            **dataclasses.asdict(device),
            **{name: _number(means[name][place]) for name in PHASES},
            "share": _number(means["shares"][place]),
            "seconds_per_sample": _number(per_sample[place]),
            "spread": _number(spread[place]),
        }
        for place, device in enumerate(recording.devices)
    ]


def latest_hardware(content: LogContent) -> dict[str, list[float | None]]:
    """Return the values of each quantity that were known last, of all devices."""
    return {
        name: _numbers(
            np.array(
                [next((v for v in column[::-1] if np.isfinite(v)), np.nan) for column in values.T]
            )
        )
        for name, values in content.recording.hardware.items()
    }


def heat_map(
    content: LogContent, name: str, how: str, most_columns: int = MOST_COLUMNS
) -> dict[str, Any] | None:
    """Return a quantity of all replicas over steps, None if there is no such quantity."""
    chosen = _series(content, name)
    if chosen is None:
        return None
    edges = edges_between(*span(content), min(most_columns, MOST_COLUMNS))
    steps, every, middle, highest = chosen
    cells = columns(steps, every, highest if how == "highest" else middle, edges, how).T
    group = max(math.ceil(len(cells) / MOST_ROWS), 1)
    if group > 1:
        cells = windows(cells, group)[:, 2 if how == "highest" else 1]
    known = cells[np.isfinite(cells)]
    low, high = np.quantile(known, (0.01, 0.99)) if len(known) else (math.nan, math.nan)
    return {
        "edges": edges.tolist(),
        "group": group,
        "rows": len(cells),
        "values": _packed(cells),
        "sampled": sampled(content, edges) if name in (*_TIMES, "share") else None,
        "low": _number(low),
        "high": _number(high),
    }


def lanes(
    content: LogContent, devices: Sequence[int], most_columns: int = LANE_COLUMNS
) -> dict[str, Any]:
    """Return times and shares of some replicas over steps, medians of each column."""
    recording = content.recording
    chosen = [each for each in devices if 0 <= each < len(recording.devices)]
    edges = edges_between(*span(content), min(most_columns, LANE_COLUMNS))

    def cut(values: Floats) -> str:
        cells = columns(recording.steps, content.every, values[:, chosen], edges, "median")
        return _packed(cells.T)

    return {
        "edges": edges.tolist(),
        "devices": chosen,
        **{name: cut(getattr(recording, name)) for name in PHASES},
        "share": cut(recording.shares),
        "sampled": sampled(content, edges),
    }


def sampled(content: LogContent, edges: Integers) -> list[tuple[int, str]] | None:
    """Return of each column how many steps were not measured and what to say; None if all were."""
    measured, known = content.recording.measured, content.windows
    if measured is None or known is None or measured.all():
        return None
    bounds = np.searchsorted(content.recording.steps, edges)
    found = []
    for begin, end in itertools.pairwise(bounds.tolist()):
        unmeasured, text = int(np.sum(~measured[begin:end])), ""
        parts = np.unique(known[begin:end], axis=0)
        if len(parts) == 1 and parts[0, 0] < parts[0, 1]:
            first, last = parts[0].tolist()
            text = f"measured step {last:,}; stands for steps {first:,} to {last:,}"
        elif unmeasured:
            text = f"{end - begin - unmeasured:,} of {end - begin:,} steps measured"
        found.append((unmeasured, text))
    return found


def edges_between(first: int, last: int, most: int) -> Integers:
    """Return the steps at which columns begin, and the end of the last one."""
    num = max(min(most, last - first), 1)
    return np.unique(np.round(np.linspace(first, max(last, first + 1), num + 1)).astype(np.int64))


def columns(steps: Integers, every: Integers, values: Floats, edges: Integers, how: str) -> Floats:
    num = len(edges) - 1
    result = np.full((num, values.shape[1]), np.nan)
    if not len(steps):
        return result
    bounds = np.searchsorted(steps, edges)
    begin, end = bounds[:-1], bounds[1:]
    place = 2 if how == "highest" else 1
    widest = int(np.max(end - begin))
    if np.all(end - begin == widest) and widest:  # all alike, but perhaps the last: at once
        result[:] = windows(values[begin[0] : end[-1]], widest)[:, place]
        return result
    for column in range(num):
        if end[column] > begin[column]:
            rows = values[begin[column] : end[column]]
            result[column] = rows[0] if len(rows) == 1 else windows(rows, len(rows))[0, place]
        elif begin[column]:
            before = begin[column] - 1
            if steps[before] + every[before] > edges[column]:
                result[column] = values[before]
    return result


def _quantities(recording: Recording) -> Iterator[tuple[str, str, str]]:
    for name, title in _TIMES.items():
        yield name, title, "s"
    yield "share", "Share of the global batch", "samples"
    for name, values in recording.hardware.items():
        if np.any(np.isfinite(values)):
            unit, title = HARDWARE.get(name, ("", name))
            yield name, title, unit


def _series(content: LogContent, name: str) -> tuple[Integers, Integers, Floats, Floats] | None:
    """The steps of a quantity's rows, how many each stands for, medians and highest values."""
    recording = content.recording
    if name in recording.hardware:
        values = recording.hardware[name]
        # A sample stands for the steps up to the next one.
        steps = recording.hardware_steps
        end = int(recording.steps[-1] + content.every[-1]) if len(recording.steps) else 0
        every = np.diff(np.append(steps, max(end, int(steps[-1]) + 1) if len(steps) else end))
        return (steps, every, values, values)
    if name == "wall":
        middle, highest = recording.wall, np.sum(content.highest[:, : len(PHASES)], axis=1)
        # The phases reach their highest values in different steps: no step took their sum.
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
    return (recording.steps, content.every, middle, highest)


def _means(values: Floats, every: Integers) -> Floats:
    """Means over steps, stalls included, as that of the step time: they add up to it."""
    weights = np.isfinite(values) * every[:, None]
    return np.sum(np.nan_to_num(values) * weights, axis=0) / weights.sum(axis=0)


def _middle(values: Floats) -> Floats:
    if not len(values):
        return np.full(values.shape[1], np.nan)
    return windows(values, len(values))[0, 1]


def _high(values: Floats) -> Floats:
    """95th percentiles of columns; NaN where nothing is known."""
    if not len(values):
        return np.full(values.shape[1], np.nan)
    ordered = np.sort(values, axis=0)  # NaN comes last
    known = np.sum(~np.isnan(ordered), axis=0, keepdims=True)
    place = np.maximum((0.95 * (known - 1)).astype(np.int64), 0)
    return np.take_along_axis(ordered, place, axis=0)[0]


def _packed(values: Floats) -> str:
    """Little-endian float32 in base64: a tenth of the time of JSON numbers, on both sides."""
    return base64.b64encode(values.astype("<f4").tobytes()).decode("ascii")


def _number(value: Any) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _numbers(values: Floats) -> list[float | None]:
    return [_number(value) for value in values]
