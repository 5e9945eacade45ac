"""Parts of plots as SVG: scales, axes, paths, text."""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Iterable, Sequence

import numpy as np

from keras_het.launch.report.plain_text import number
from keras_het.planning.diagnosis.recording import Floats, Integers

WIDTH = 1000
LEFT = 170
RIGHT = 150
_FINE = 10  # paths have coordinates in tenths, as whole numbers
_CHARACTER = 6.3  # width of a small letter


@dataclasses.dataclass(frozen=True)
class Scale:
    """A straight scale from values to coordinates."""

    low: float
    high: float
    begin: float
    end: float

    def __call__(self, value: float) -> float:
        """Return the coordinate of a value, within the scale."""
        part = (value - self.low) / (self.high - self.low)
        return self.begin + min(max(part, 0.0), 1.0) * (self.end - self.begin)

    def ticks(self, most: int, whole: bool = False) -> list[float]:
        """Return round values within the scale."""
        span = self.high - self.low
        raw = span / max(most, 1)
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(f * power for f in (1.0, 2.0, 5.0, 10.0) if f * power >= raw * 0.999)
        step = max(step, 1.0) if whole else step
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [index * step for index in range(first, min(last, first + 50) + 1)]


def time_scale(steps: Sequence[int]) -> Scale:
    """Return the horizontal scale of steps."""
    return Scale(float(steps[0]), float(max(steps[-1], steps[0] + 1)), LEFT, WIDTH - RIGHT)


def figure(title: str, note: str, height: float, parts: Iterable[str]) -> str:
    """Return a plot with a caption."""
    label = html.escape(title, quote=True)
    return (
        f"<figure><figcaption><h2>{label}</h2><p>{html.escape(note)}</p></figcaption>"
        f'<div class="scroll"><svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" '
        f'aria-label="{label}">{"".join(parts)}</svg></div></figure>\n'
    )


def text(x: float, y: float, content: str, classes: str = "", room: float = 0.0) -> str:
    """Return a text; one that is too long for its room is cut, and in full when pointed at."""
    most = int(room / _CHARACTER) if room else len(content)
    shown, full = content, ""
    if len(content) > most:
        shown, full = f"{content[: max(most - 1, 1)]}…", f"<title>{html.escape(content)}</title>"
    kind = f' class="{classes}"' if classes else ""
    return f'<text x="{x:.0f}" y="{y:.1f}"{kind}>{full}{html.escape(shown)}</text>'


def x_axis(scale: Scale, y: float) -> str:
    """Return ticks of steps."""
    marks = [
        f'<path class="axis" d="M{scale(tick):.1f} {y:.1f}v4"/>'
        + text(scale(tick), y + 17, f"{tick:.0f}", "middle")
        for tick in scale.ticks(8, whole=True)
    ]
    line = f'<path class="axis" d="M{scale.begin} {y:.1f}H{scale.end}"/>'
    return f"{line}{''.join(marks)}{text(scale.end + 26, y + 17, 'step')}"


def y_axis(scale: Scale, unit: str, factor: float = 1.0) -> str:
    """Return ticks of values with lines across the plot."""
    shown = Scale(scale.low * factor, scale.high * factor, scale.begin, scale.end)
    marks = []
    for tick in shown.ticks(5):
        y = shown(tick)
        marks.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        marks.append(text(LEFT - 8, y + 4, number(tick), "end"))
    marks.append(text(LEFT - 8, scale.end - 10, unit, "end"))
    return "".join(marks)


def stairs(x: Sequence[int], y: Sequence[int], base: int | None = None) -> str:
    """Return the path of a value that holds from each x to the next."""
    parts = [f"M{x[0]} {y[0] if base is None else base}"]
    at, place = (y[0] if base is None else base), x[0]
    for index, value in enumerate(y):
        if value != at:
            if place != x[index]:
                parts.append(f"h{x[index] - place}")
                place = x[index]
            parts.append(f"v{value - at}")
            at = value
    parts.append(f"H{x[len(y)]}")
    if base is not None:
        parts.append(f"V{base}z")
    return "".join(parts)


def fine(scale: Scale, values: Floats | Integers | Sequence[int]) -> list[int]:
    """Return coordinates in tenths, for a group with `fine_group` around it."""
    known = np.asarray(values, np.float64)
    known = np.where(np.isfinite(known), known, 0.0)
    part = np.clip((known - scale.low) / (scale.high - scale.low), 0.0, 1.0)
    places = np.rint(_FINE * (scale.begin + part * (scale.end - scale.begin)))
    return [int(place) for place in places]


def fine_group(content: str) -> str:
    """Return elements whose coordinates are in tenths."""
    return f'<g transform="scale({1 / _FINE})">{content}</g>'


def top_of(values: Floats, most: float = 100.0) -> float:
    """Return the end of a scale from 0 that a few outliers do not stretch."""
    known = np.asarray(values, np.float64)
    known = known[np.isfinite(known) & (known > 0)]
    return float(np.percentile(known, most)) * 1.05 if len(known) else 1.0
