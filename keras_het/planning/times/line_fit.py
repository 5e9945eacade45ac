"""A straight line through noisy compute times with outliers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

# Two shares identify a line if the larger one is at least this many times the smaller one.
MIN_SPREAD = 1.1
# A slope is at least this fraction of time per sample, so that no device looks infinitely fast.
MIN_SLOPE_FRACTION = 0.05
# Uncertainty of the earlier fixed part: its standard deviation as a fraction of the compute time.
FIXED_PART_DEVIATION = 0.5
_MIN_NOISE = 0.01


@dataclasses.dataclass(frozen=True)
class Measurement:
    """The measurement of one replica with one share."""

    share: int
    seconds: float
    count: int


def measurements(shares: Sequence[int], seconds: Sequence[float]) -> list[Measurement]:
    """Group observations by share, with their lower medians: outliers are slow."""
    grouped: dict[int, list[float]] = {}
    for share, value in zip(shares, seconds, strict=True):
        grouped.setdefault(share, []).append(value)
    return [
        Measurement(int(share), float(sorted(values)[(len(values) - 1) // 2]), len(values))
        for share, values in grouped.items()
    ]


def fit_line(
    points: Iterable[Measurement], fixed_before: float, noise: float
) -> tuple[float, float, bool]:
    r"""Fit t(n) = fixed + slope n with fixed >= 0 and slope > 0.

    Minimizes squared relative errors, weighted by counts, plus the squared distance to the
    previously known fixed part (a ridge):

    .. math:: \sum_g \frac{c_g}{\sigma^2} \left(\frac{f + s n_g}{t_g} - 1\right)^2
        + \left(\frac{f - f_0}{0.5\, \bar t}\right)^2

    With one share, the fixed part keeps its value and the slope goes through the point. A share
    measured once counts only if no other was measured more often.
    """
    chosen = list(points)
    often = [point for point in chosen if point.count > 1]
    chosen = often or chosen
    fixed, slope = _ridge(chosen, fixed_before, max(noise, _MIN_NOISE))
    if fixed < 0:
        fixed, slope = 0.0, _slope_for(chosen, 0.0)
    smallest_slope = MIN_SLOPE_FRACTION * min(point.seconds / point.share for point in chosen)
    if slope < smallest_slope:
        slope = smallest_slope
        total = sum(point.count for point in chosen)
        rest = sum(point.count * (point.seconds - slope * point.share) for point in chosen)
        fixed = max(rest / total, 0.0)
    extremes = [point.share for point in chosen]
    return fixed, slope, max(extremes) >= MIN_SPREAD * min(extremes)


def _ridge(points: list[Measurement], fixed_before: float, noise: float) -> tuple[float, float]:
    mean = sum(point.seconds for point in points) / len(points)
    prior = 1.0 / (FIXED_PART_DEVIATION * mean) ** 2
    a11, a12, a22, b1, b2 = prior, 0.0, 0.0, prior * fixed_before, 0.0
    for point in points:
        weight = point.count / (noise * point.seconds) ** 2
        a11 += weight
        a12 += weight * point.share
        a22 += weight * point.share**2
        b1 += weight * point.seconds
        b2 += weight * point.seconds * point.share
    determinant = a11 * a22 - a12 * a12
    if determinant <= 0:  # one dominant time leaves the others to rounding
        return 0.0, b2 / a22
    return (b1 * a22 - b2 * a12) / determinant, (a11 * b2 - a12 * b1) / determinant


def _slope_for(points: list[Measurement], fixed: float) -> float:
    over = sum(p.count * p.share * (p.seconds - fixed) / p.seconds**2 for p in points)
    under = sum(p.count * (p.share / p.seconds) ** 2 for p in points)
    return over / under
