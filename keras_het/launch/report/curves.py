"""Plots over the steps: shares of replicas, and the time of a step."""

from __future__ import annotations

import html
from collections.abc import Iterable

import numpy as np

from keras_het.launch.report import svg
from keras_het.launch.report.bins import Bins, bins_of
from keras_het.launch.report.facts import Facts
from keras_het.launch.report.wording import change_text
from keras_het.planning.diagnosis.middles import checked
from keras_het.planning.diagnosis.recording import Floats, Recording

_BINS = 240
_LEAST_BINS = 60
_COLOURED = 6
_MOST_LINES = 256
_MOST_CELLS = 24_000
_HEIGHT = 230
_TOP, _BOTTOM = 26, 30
_LABEL = 14
_MOST_MARKS = 40
_OUTLIERS = 99.5


def shares_over_time(facts: Facts) -> str:
    """Return the plot of shares; empty if there are none."""
    recording = facts.recording
    shares = checked(recording.shares, np.inf)
    if not np.isfinite(shares).any():
        return ""
    bins = bins_of(
        recording.steps, facts.every, min(_BINS, max(_MOST_CELLS // shares.shape[1], 60))
    )
    values = bins.medians(shares)
    coloured = _most_changed(values)
    lines = [*(set(range(min(values.shape[1], _MOST_LINES))) - set(coloured)), *coloured]
    x_scale, y_scale = _scales(bins, svg.top_of(values))
    x = svg.fine(x_scale, bins.steps)
    paths = []
    for replica in lines:
        kind = f"line s{coloured.index(replica)}" if replica in coloured else "line rest"
        y = svg.fine(y_scale, values[:, replica])
        paths.append(f'<path class="{kind}" d="{svg.stairs(x, y)}"/>')
    labels = [
        (y_scale(float(np.nan_to_num(values[-1, replica]))), facts.devices[replica].device.name, n)
        for n, replica in enumerate(coloured)
    ]
    note = "Samples of each step, and dotted lines where something was changed."
    if len(facts.devices) > len(coloured):
        note += f" Coloured: the {len(coloured)} replicas whose share has changed most."
    parts = [
        svg.y_axis(y_scale, "samples"),
        _marks(recording, x_scale),
        svg.fine_group("".join(paths)),
        *_labels(labels),
        svg.x_axis(x_scale, _HEIGHT - _BOTTOM),
    ]
    return svg.figure("Shares", note, _HEIGHT, parts)


def step_time(facts: Facts) -> str:
    """Return the plot of the time of a step; empty if it is not known."""
    recording = facts.recording
    wall = np.fmax.reduce(checked(recording.wall), axis=1, initial=-np.inf)
    wall = np.where(np.isfinite(wall), wall, np.nan)
    if not np.isfinite(wall).any():
        return ""
    bins = bins_of(recording.steps, facts.every, _BINS)
    middle = bins.medians(wall)
    highest, lowest = bins.highest(wall), bins.lowest(wall)
    x_scale, y_scale = _scales(bins, max(svg.top_of(highest, 95.0), svg.top_of(middle, _OUTLIERS)))
    x = svg.fine(x_scale, bins.steps)
    upper, lower = svg.fine(y_scale, highest), svg.fine(y_scale, lowest)
    band = svg.stairs(x, upper) + svg.stairs(x[::-1], lower[::-1]).replace("M", "L", 1) + "z"
    line = svg.stairs(x, svg.fine(y_scale, middle))
    paths = f'<path class="band" d="{band}"/><path class="line s0" d="{line}"/>'
    parts = [
        svg.y_axis(y_scale, "ms", 1e3),
        _marks(recording, x_scale),
        svg.fine_group(paths),
        svg.x_axis(x_scale, _HEIGHT - _BOTTOM),
    ]
    note = (
        "Median of neighbouring steps; the band goes from the shortest to the longest of them. A "
        "few very long ones are cut off."
    )
    return svg.figure("Time of a step", note, _HEIGHT, parts)


def _scales(bins: Bins, top: float) -> tuple[svg.Scale, svg.Scale]:
    y_scale = svg.Scale(0.0, top, _HEIGHT - _BOTTOM, _TOP)
    return svg.time_scale(bins.steps.tolist()), y_scale


def _most_changed(values: Floats) -> list[int]:
    span = np.nan_to_num(np.fmax.reduce(values, axis=0) - np.fmin.reduce(values, axis=0))
    order = np.argsort(-span, kind="stable")[:_COLOURED]
    return sorted(order.tolist())


def _marks(recording: Recording, scale: svg.Scale) -> str:
    changes = recording.changes
    stride = max(-(-len(changes) // _MOST_MARKS), 1)
    return "".join(
        f'<path class="mark" d="M{scale(each.step):.1f} {_TOP}V{_HEIGHT - _BOTTOM}"><title>step '
        f"{each.step}: {html.escape(change_text(each))}</title></path>"
        for each in changes[::stride]
        if scale.low <= each.step <= scale.high
    )


def _labels(labels: Iterable[tuple[float, str, int]]) -> Iterable[str]:
    """Yield names at the ends of lines, moved apart, from the lowest line up."""
    limit = float(_HEIGHT - _BOTTOM)
    for y, name, colour in sorted(labels, key=lambda each: -each[0]):
        at = min(y, limit)
        limit = at - _LABEL
        x = svg.WIDTH - svg.RIGHT + 8
        sample = f'<path class="line s{colour}" d="M{10 * x} {10 * at:.0f}h200"/>'
        yield svg.fine_group(sample) + svg.text(x + 26, at + 4, name, "", svg.RIGHT - 34)
