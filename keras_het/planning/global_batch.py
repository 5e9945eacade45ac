"""Choice of the global batch size that makes the most progress per second."""

from __future__ import annotations

import math
from collections.abc import Callable

from keras_het.planning.noise_scale import NoiseScaleEstimate


def gain(scale: float, estimate: NoiseScaleEstimate) -> float:
    r"""Return how many steps of the base batch one step of a larger batch is worth.

    .. math:: r(s) = \frac{S / B_0 + |G|^2}{S / (B_0 s) + |G|^2}

    in terms of the noise at the base batch: between 1 (no noise) and s (noise alone). It is also
    the factor for the learning rate of SGD (AdaScale); adaptive optimizers take its square root.
    """
    if not scale > 0:
        raise ValueError(f"scale must be positive. Received: {scale!r}.")
    variance, norm = max(estimate.variance, 0.0), max(estimate.squared_norm, 0.0)
    if variance + norm == 0.0:
        return 1.0
    noise = variance / (variance + norm)  # normalize first: the smallest floats do not survive / s
    return 1.0 / (noise / scale + (1.0 - noise))


def rate_factor_of_batch(
    global_batch_size: int,
    base_batch_size: int,
    estimate: NoiseScaleEstimate,
    adaptive_optimizer: bool = False,
) -> float:
    """Return the factor for a learning rate chosen for the base batch."""
    factor = _gain(global_batch_size, base_batch_size, estimate)
    return math.sqrt(factor) if adaptive_optimizer else factor


def goodput(
    global_batch_size: int,
    base_batch_size: int,
    step_seconds: float,
    estimate: NoiseScaleEstimate,
) -> float:
    """Return useful samples per second: throughput times statistical efficiency.

    The efficiency r / s is the progress of a sample in this batch over that of a sample in the base
    batch, so goodput is r * base batch / step time.
    """
    if not step_seconds > 0:
        raise ValueError(f"step_seconds must be positive. Received: {step_seconds!r}.")
    return _gain(global_batch_size, base_batch_size, estimate) * base_batch_size / step_seconds


def candidate_batch_sizes(smallest: int, largest: int, count: int = 50) -> tuple[int, ...]:
    """Return a geometric grid of global batch sizes."""
    if not 1 <= smallest <= largest or count < 2:
        raise ValueError(
            "Sizes must satisfy 1 <= smallest <= largest, and count must be at least 2. "
            f"Received: smallest={smallest}, largest={largest}, count={count}."
        )
    ratio = largest / smallest
    grid = {round(smallest * ratio ** (point / (count - 1))) for point in range(count)}
    return tuple(sorted(grid | {smallest, largest}))


def choose_global_batch(
    step_seconds: Callable[[int], float],
    base_batch_size: int,
    largest: int,
    estimate: NoiseScaleEstimate,
    *,
    present: int | None = None,
    min_gain: float = 0.05,
) -> int:
    """Choose the global batch size with the best goodput on a geometric grid."""

    def rate(size: int) -> float:
        return goodput(size, base_batch_size, step_seconds(size), estimate)

    best = max(
        candidate_batch_sizes(base_batch_size, largest), key=lambda size: (rate(size), -size)
    )
    if present is not None and rate(best) <= (1 + min_gain) * rate(present):
        return present
    return best


def _gain(size: int, base: int, estimate: NoiseScaleEstimate) -> float:
    if size < 1 or base < 1:
        raise ValueError(
            f"Batch sizes must be at least 1. Received: global {size} and base {base}."
        )
    of_base = NoiseScaleEstimate(estimate.squared_norm, estimate.variance / base)
    return gain(size / base, of_base)
