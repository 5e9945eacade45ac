"""Whole-sample shares of a global batch from real-valued weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from numbers import Rational
from typing import SupportsFloat


def apportion(total: int, weights: Sequence[SupportsFloat]) -> tuple[int, ...]:
    """Split `total` samples in proportion to `weights` by the largest-remainder method.

    Replica i's quota is `total * weights[i] / sum(weights)`. Every replica gets the integer part of
    its quota; the remaining samples go, one each, to the largest fractional parts, ties to the
    lowest index. Every share therefore differs from its quota by less than one sample. Quotas are
    exact fractions, so rounding noise never decides about a sample.

    Args:
        total: number of samples, zero or more.
        weights: one finite weight per replica, zero or more, at least one of them positive.

    Returns:
        One share per weight; they sum to `total`, and a zero weight gets zero.

    Raises:
        ValueError: if `total` is negative, or a weight is negative, not finite, or all are zero.
        TypeError: if `total` is not an integer.

    Reference:
        Hamilton's method: Balinski and Young, "Fair Representation", 2nd ed., 2001.
    """
    if total != int(total):
        raise TypeError(f"total must be a whole number of samples. Received: {total!r}.")
    total = int(total)
    if total < 0:
        raise ValueError(f"total must be zero or more samples. Received: {total}.")
    exact = exact_weights(weights)
    weight_sum = sum(exact)
    # Floor and remainder over the common denominator weight_sum.
    parts = [divmod(total * weight, weight_sum) for weight in exact]
    shares = [int(whole) for whole, _ in parts]
    by_remainder = sorted(range(len(parts)), key=lambda index: (-parts[index][1], index))
    for index in by_remainder[: total - sum(shares)]:
        shares[index] += 1
    return tuple(shares)


def exact_weights(weights: Sequence[SupportsFloat]) -> tuple[Fraction, ...]:
    """Check share weights and return them as exact fractions."""
    exact = []
    for weight in weights:
        if not math.isfinite(weight) or float(weight) < 0:
            raise ValueError(
                "Every weight must be a finite number, zero or more. "
                f"Received: {weight!r} in {list(weights)}."
            )
        exact.append(Fraction(weight if isinstance(weight, Rational) else float(weight)))
    if not any(exact):
        raise ValueError(
            f"At least one weight must be positive, else no replica takes a sample. "
            f"Received: {list(weights)}."
        )
    return tuple(exact)
