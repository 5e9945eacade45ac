"""Plot of what a step would take without each trouble."""

from __future__ import annotations

from keras_het.launch.report import svg
from keras_het.launch.report.facts import Facts
from keras_het.launch.report.plain_text import difference, milliseconds
from keras_het.launch.report.repairs import Repair

_LEFT = 330
_ROW = 24
_BAR = 15
_TOP = 8


def what_if_bars(facts: Facts) -> str:
    """Return the plot; empty without steps."""
    repairs = facts.repairs
    if not repairs.step_seconds > 0:
        return ""
    now = Repair("now", repairs.step_seconds, 0.0)
    even = [repairs.even] if repairs.even and not repairs.is_even else []
    groups = [("now", [now, *even]), ("repair", repairs.worst), ("phase", repairs.phases)]
    longest = max(each.seconds for _, group in groups for each in group)
    scale = svg.Scale(0.0, longest, _LEFT, svg.WIDTH - svg.RIGHT)
    bars = []
    y = float(_TOP)
    for kind, group in groups:
        for each in group:
            bars.append(_bar(each, kind, y, scale, is_now=each is now))
            y += _ROW
        y += 6 if group else 0
    line = scale(now.seconds)
    # behind the bars and their numbers
    parts = [f'<path class="mark" d="M{line:.1f} {_TOP - 4}V{y:.1f}"/>', *bars]
    note = f"Predicted ({facts.of_recent}): one thing is repaired, and all else stays as it is."
    return svg.figure("What a step would take", note, y + 4, parts)


def _bar(repair: Repair, kind: str, y: float, scale: svg.Scale, is_now: bool) -> str:
    width = scale(repair.seconds) - scale.begin
    value = f"{milliseconds(repair.seconds)} ms"
    if not is_now:
        value += f" ({difference(-repair.saved)})"
    end = scale(repair.seconds)
    return (
        svg.text(_LEFT - 8, y + 12, repair.name, "end", _LEFT - 12)
        + f'<rect class="bar {kind}" x="{_LEFT}" y="{y:.1f}" width="{width:.1f}" '
        f'height="{_BAR}"/>' + svg.text(end + 6, y + 12, value, "value")
    )
