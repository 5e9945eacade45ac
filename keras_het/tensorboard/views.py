"""What each route answers, as plain values for JSON; all limits on their size are here."""

from __future__ import annotations

import base64
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_het.planning.diagnosis.recording import PHASES, Floats
from keras_het.planning.diagnosis.steps import throughput
from keras_het.planning.pipeline import Timeline
from keras_het.tensorboard.columns import columns, edges_between, windows
from keras_het.tensorboard.log_content import LogContent
from keras_het.tensorboard.pipeline_format import parse_timeline, timeline_values
from keras_het.tensorboard.quantities import quantities, series

MOST_COLUMNS, MOST_ROWS = 600, 200
MOST_LANES = 24
_LANE_COLUMNS = 300
_MOST_ROWS_FOR_MEDIANS = 1_000
_MOST_CHANGES, _MOST_EXCHANGES = 500, 500
_LONGEST_TEXT = 1_000
_MOST_PASSES, _LONGEST_PLAN, _LONGEST_NAME = 10_000, 100_000, 200


def between(content: LogContent, first: int | None, last: int | None) -> LogContent:
    """Return the part of a training with some steps."""
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
        exchanges=tuple(each for each in content.exchanges if begin <= each["step"] < end),
        passes=tuple(each for each in content.passes if begin <= each[0] < end) or content.passes,
    )


def span(content: LogContent) -> tuple[int, int]:
    """Return the first step of a training and the step after its last one; 0, 0 without steps."""
    steps = content.recording.steps
    return (int(steps[0]), int(steps[-1] + content.every[-1])) if len(steps) else (0, 0)


def overview(content: LogContent) -> dict[str, Any]:
    """Return devices with their medians, changes and exchanges of a training or a part of it."""
    recording = content.recording
    first, last = span(content)
    rows = np.arange(len(recording.steps))[
        :: max(len(recording.steps) // _MOST_ROWS_FOR_MEDIANS, 1)
    ]
    speed = throughput(recording.wall, recording.samples, content.every)
    return {
        "first": first,
        "last": last,
        "rows": len(rows),
        "thinned": bool(np.any(content.every > 1)),
        **{name: _number(value) for name, value in dataclasses.asdict(speed).items()},
        "pauses": len(recording.pauses),
        "pause_seconds": _number(sum(seconds for _, seconds in recording.pauses)),
        "devices": _devices(content, rows),
        "quantities": [dataclasses.asdict(each) for each in quantities(content)],
        "pipeline": recording.pipeline is not None,
        "changes": [
            {"step": each.step, "kind": each.kind[:60], "text": each.text[:_LONGEST_TEXT]}
            for each in recording.changes[-_MOST_CHANGES:]
        ],
        "exchanges": [_plain(each) for each in content.exchanges[-_MOST_EXCHANGES:]],
    }


def pipeline(content: LogContent) -> dict[str, Any]:
    """Return the plan of a model in stages, and the passes of one step, predicted and measured."""
    recording, record = content.recording, content.recording.pipeline
    names = [device.name for device in recording.devices]
    if record is None:
        return {"text": "", "stages": [], "devices": names, "predicted": None, "measured": None}
    measured = None
    for step, text in reversed(content.passes):
        try:
            timeline = parse_timeline(text)
        except ValueError:
            continue
        if len(timeline.events) == len(names):
            measured = {"step": step, **_timeline(timeline)}
            break
    return {
        "text": record.text[:_LONGEST_PLAN],
        "stages": [
            {
                **dataclasses.asdict(stage),
                "layers": [each[:_LONGEST_NAME] for each in stage.layers],
                "recomputed": [each[:_LONGEST_NAME] for each in stage.recomputed],
            }
            for stage in record.stages
        ],
        "devices": names,
        "predicted": None if record.predicted is None else _timeline(record.predicted),
        "measured": measured,
    }


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


def _devices(content: LogContent, rows: Any) -> list[dict[str, Any]]:
    recording = content.recording
    middles = {name: _middle(getattr(recording, name)[rows]) for name in (*PHASES, "shares")}
    shares = recording.shares[rows]
    seconds = recording.compute[rows] / np.where(shares > 0, shares, np.nan)
    per_sample = _middle(seconds)
    spread = _high(seconds) / per_sample
    return [
        {
            **dataclasses.asdict(device),
            **{name: _number(middles[name][place]) for name in PHASES},
            "share": _number(middles["shares"][place]),
            "seconds_per_sample": _number(per_sample[place]),
            "spread": _number(spread[place]),
        }
        for place, device in enumerate(recording.devices)
    ]


def heat_map(
    content: LogContent, name: str, how: str, most_columns: int = MOST_COLUMNS
) -> dict[str, Any] | None:
    """Return a quantity of all replicas over steps, None if there is no such quantity."""
    chosen = series(content, name)
    if chosen is None:
        return None
    first, last = span(content)
    edges = edges_between(first, last, min(most_columns, MOST_COLUMNS))
    values = chosen.highest if how == "highest" else chosen.middle
    cells = columns(chosen.steps, chosen.every, values, edges, how).T
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
        "low": _number(low),
        "high": _number(high),
    }


def lanes(content: LogContent, devices: Sequence[int]) -> dict[str, Any]:
    """Return times and shares of some replicas over steps, medians of each column."""
    recording = content.recording
    chosen = [each for each in devices if 0 <= each < len(recording.devices)][:MOST_LANES]
    edges = edges_between(*span(content), _LANE_COLUMNS)

    def cut(values: Floats) -> str:
        cells = columns(recording.steps, content.every, values[:, chosen], edges, "median")
        return _packed(cells.T)

    return {
        "edges": edges.tolist(),
        "devices": chosen,
        **{name: cut(getattr(recording, name)) for name in PHASES},
        "share": cut(recording.shares),
    }


def _middle(values: Floats) -> Floats:
    if not len(values):
        return np.full(values.shape[1], np.nan)
    middle: Floats = windows(values, len(values))[0, 1]
    return middle


def _high(values: Floats) -> Floats:
    """95th percentiles of columns; NaN where nothing is known."""
    if not len(values):
        return np.full(values.shape[1], np.nan)
    ordered = np.sort(values, axis=0)  # NaN comes last
    known = np.sum(~np.isnan(ordered), axis=0, keepdims=True)
    place = np.maximum((0.95 * (known - 1)).astype(np.int64), 0)
    high: Floats = np.take_along_axis(ordered, place, axis=0)[0]
    return high


def _packed(values: Floats) -> str:
    """Little-endian float32 in base64: a tenth of the time of JSON numbers, on both sides."""
    return base64.b64encode(values.astype("<f4").tobytes()).decode("ascii")


def _number(value: Any) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _plain(entry: dict[str, Any]) -> dict[str, Any]:
    return {
        str(key)[:60]: _number(value) if isinstance(value, int | float) else str(value)[:60]
        for key, value in entry.items()
        if value is not None
    }
