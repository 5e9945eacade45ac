"""Plot of each replica's four times over the steps, a lane for each replica."""

from __future__ import annotations

import numpy as np

from keras_het.launch.report import svg
from keras_het.launch.report.bins import bins_of
from keras_het.launch.report.facts import Facts
from keras_het.launch.report.plain_text import milliseconds
from keras_het.planning.diagnosis.middles import checked
from keras_het.planning.diagnosis.recording import PHASES, Floats

MOST_LANES = 256
# Replicas times bins: what a page may hold.
_MOST_CELLS = 24_000
_MOST_BINS = 240
_LEAST_BINS = 60
_TOP = 34
_GAP = 3
_OUTLIERS = 98.0


def lanes(facts: Facts) -> str:
    """Return the plot; empty without steps."""
    recording = facts.recording
    if not len(recording.steps) or not facts.devices:
        return ""
    shown = sorted(each.index for each in facts.slowest_first()[:MOST_LANES])
    most = min(max(_MOST_CELLS // len(shown), _LEAST_BINS), _MOST_BINS)
    bins = bins_of(recording.steps, facts.every, most)
    phases = np.stack(
        [bins.medians(checked(getattr(recording, name))[:, shown]) for name in PHASES]
    )
    tops = np.nancumsum(phases, axis=0)  # [phases, bins, replicas]
    longest = svg.top_of(tops[-1], _OUTLIERS)
    height = 36 if len(shown) <= 8 else 22 if len(shown) <= 32 else 13
    time = svg.time_scale(bins.steps.tolist())
    x = svg.fine(time, bins.steps)
    parts = [_legend()]
    for place, index in enumerate(shown):
        y = _TOP + place * (height + _GAP)
        scale = svg.Scale(0.0, longest, y + height, y)
        parts.append(_lane(tops[:, :, place], scale, x))
        name = facts.devices[index].device.name
        parts.append(svg.text(svg.LEFT - 8, y + height / 2 + 4, name, "end", svg.LEFT - 12))
    bottom = _TOP + len(shown) * (height + _GAP)
    parts.append(svg.x_axis(time, bottom))
    left_out = len(facts.devices) - len(shown)
    note = (
        f"The height of a lane is {milliseconds(longest)} ms of a step; longer steps are cut off. "
        "Medians of neighbouring steps."
    )
    if left_out:
        note += f" {left_out} replicas that cost least are left out."
    return svg.figure("Where the time of each replica goes", note, bottom + 26, parts)


def _lane(tops: Floats, scale: svg.Scale, x: list[int]) -> str:
    """Return areas from the sum of all phases down to the first phase, one before the other."""
    base = svg.fine(scale, [0])[0]
    paths = []
    for phase in reversed(range(len(PHASES))):
        y = svg.fine(scale, tops[phase])
        if min(y, default=base) < base:
            paths.append(f'<path class="{PHASES[phase]}" d="{svg.stairs(x, y, base)}"/>')
    return svg.fine_group("".join(paths))


def _legend() -> str:
    parts = []
    x = svg.LEFT
    for name in PHASES:
        parts.append(f'<rect class="{name}" x="{x}" y="6" width="13" height="13"/>')
        parts.append(svg.text(x + 19, 17, name))
        x += 110
    return "".join(parts)
