"""Gradient noise scale from replicas with unequal shares."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import ArrayLike

EXPECTED_GROWTH = 2.0
"""Factor from the noise scale of the first steps to that of a whole training.

The scale grows as the loss falls, by an order of magnitude and more in published trainings
(McCandlish et al., "An Empirical Model of Large-Batch Training", 2018); twice is a modest part.
"""
_DECAY = 0.99


@dataclasses.dataclass(frozen=True)
class NoiseScaleEstimate:
    """Unbiased estimates of one step, or averages of several; one alone may be negative."""

    squared_norm: float
    variance: float

    @property
    def noise_scale(self) -> float:
        """Ratio of variance to squared norm, in samples; infinite if noise hides the gradient."""
        if self.squared_norm <= 0:
            return float("inf")
        return max(self.variance, 0.0) / self.squared_norm


def noise_scale_estimate(
    shares: ArrayLike, squared_norms: ArrayLike, global_squared_norm: float
) -> NoiseScaleEstimate:
    """Estimate from the replicas' gradients g_i against the global one g, in one step."""
    # E|g_i|^2 = |G|^2 + S / b_i and E|g|^2 = |G|^2 + S / B, with the true gradient G and the trace
    # S of the covariance of a sample's gradient. A replica's weight (B - b_i) / ((n - 1) B) depends
    # only on the shares, so that the sum stays unbiased, and cancels the factor by which a large
    # share magnifies noise. The authors use minimum-variance weights, whose moments were not found;
    # these are ours.
    b, local = np.asarray(shares, np.float64), np.asarray(squared_norms, np.float64)
    if b.shape != local.shape or b.ndim != 1 or (b > 0).sum() < 2:
        raise ValueError(
            "There must be one share and one squared norm a replica, and at least two replicas "
            f"with samples. Received: shares={shares!r}, squared_norms={squared_norms!r}. With one "
            "replica, split its batch into two parts."
        )
    b, local = b[b > 0], local[b > 0]
    total = b.sum()
    squared_norm = (total * global_squared_norm - b * local) / (total - b)
    variance = b * total / (total - b) * (local - global_squared_norm)
    weights = (total - b) / total / (len(b) - 1)
    return NoiseScaleEstimate(
        float((weights * squared_norm).sum()), float((weights * variance).sum())
    )


class SmoothedNoiseScale:
    """Bias-corrected exponential moving averages of both estimates, over about 100 steps."""

    def __init__(self) -> None:
        self._sums = (0.0, 0.0)
        self._weight = 0.0

    def add(self, estimate: NoiseScaleEstimate) -> None:
        new = 1.0 - _DECAY
        norm, variance = self._sums
        self._sums = (
            _DECAY * norm + new * estimate.squared_norm,
            _DECAY * variance + new * estimate.variance,
        )
        self._weight = _DECAY * self._weight + new

    @property
    def value(self) -> NoiseScaleEstimate | None:
        """The averages; None before the first step."""
        if not self._weight:
            return None
        norm, variance = self._sums
        return NoiseScaleEstimate(norm / self._weight, variance / self._weight)
