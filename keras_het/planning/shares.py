"""Whole-sample shares of a global batch from real-valued weights, and files for workers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from numbers import Rational, Real
from typing import Any, SupportsFloat

import numpy as np
from numpy.typing import ArrayLike, NDArray

from keras_het.planning.argument_checks import check_number

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

MAX_TOTAL = 2**31 - 1


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
        ValueError: if `total` is negative or not whole, or a weight is negative, not finite, or all
            are zero.

    Reference:
        Hamilton's method: Balinski and Young, "Fair Representation", 2nd ed., 2001.
    """
    check_number("total", total, least=0, whole=True)
    total = int(total)
    exact = exact_weights(weights)
    weight_sum = sum(exact)
    # Floor and remainder over the common denominator weight_sum.
    parts = [divmod(total * weight, weight_sum) for weight in exact]
    shares = [int(whole) for whole, _ in parts]
    by_remainder = sorted(range(len(parts)), key=lambda index: (-parts[index][1], index))
    for index in by_remainder[: total - sum(shares)]:
        shares[index] += 1
    return tuple(shares)


Weights = Sequence[float] | Mapping[int, float] | NDArray[Any]
"""A weight for each replica, in order or by its number."""


def weight_of_each(name: str, given: Weights, num_replicas: int) -> tuple[float, ...]:
    """Return one weight for each replica, in their order, given a list or a dict by replica."""
    if isinstance(given, Mapping):
        if wrong := set(given) ^ set(range(num_replicas)):
            raise ValueError(
                f"{name} needs one weight for each replica from 0 to {num_replicas - 1}. Received: "
                f"{name}={given!r}, in which {sorted(wrong, key=str)} are missing or do not exist."
            )
        given = [given[replica] for replica in range(num_replicas)]
    if isinstance(given, np.ndarray):
        given = given.tolist()
    is_list = isinstance(given, Sequence) and not isinstance(given, (str, bytes))
    if not is_list or not all(isinstance(weight, Real) for weight in given):
        raise TypeError(
            f"{name} must be a list with one number for each replica, or a dict from replica to "
            f"number. Received: {name}={given!r} of type {type(given).__name__}."
        )
    weights = tuple(given)
    exact_weights(weights, name)
    return weights


def exact_weights(weights: Sequence[SupportsFloat], name: str = "weights") -> tuple[Fraction, ...]:
    """Check share weights and return them as exact fractions."""
    exact = []
    for weight in weights:
        if not math.isfinite(weight) or float(weight) < 0:
            raise ValueError(
                "Every weight must be a finite number, zero or more. "
                f"Received: {weight!r} in {name}={list(weights)}."
            )
        exact.append(Fraction(weight if isinstance(weight, Rational) else float(weight)))
    if not any(exact):
        raise ValueError(
            f"At least one weight must be positive, else no replica takes a sample. "
            f"Received: {name}={list(weights)}."
        )
    return tuple(exact)


def check_bounds(
    total: int, num_replicas: int, lower: ArrayLike | None = None, upper: ArrayLike | None = None
) -> tuple[IntArray, IntArray]:
    """Check that shares within the bounds can sum to the total."""
    if isinstance(total, bool) or not isinstance(total, Real) or float(total) != int(total):
        raise TypeError(f"total must be a whole number of samples. Received: {total!r}.")
    if not 0 <= total <= MAX_TOTAL:
        raise ValueError(f"total must be from 0 to {MAX_TOTAL} samples. Received: {total}.")
    if num_replicas < 1:
        raise ValueError(f"There must be at least one replica. Received: {num_replicas}.")
    low = _whole_numbers("lower", 0 if lower is None else lower, num_replicas)
    high = _whole_numbers("upper", total if upper is None else upper, num_replicas)
    high = np.minimum(high, int(total))
    if (low < 0).any() or (low > high).any():
        index = int(np.flatnonzero((low < 0) | (low > high))[0])
        raise ValueError(
            "Bounds must satisfy 0 <= lower <= upper and lower <= total for every replica. "
            f"Received: lower {low[index]} and upper {high[index]} for replica {index} with "
            f"total={total}. Lower the one or raise the other."
        )
    if low.sum() > total or high.sum() < total:
        raise ValueError(
            f"No shares within the bounds sum to {total}: lower bounds sum to {low.sum()} and "
            f"upper bounds to {high.sum()}. Change the bounds or the global batch size."
        )
    return low, high


def proportional_shares(
    total: int,
    weights: Sequence[float] | FloatArray,
    lower: ArrayLike | None = None,
    upper: ArrayLike | None = None,
) -> IntArray:
    r"""Return shares in proportion to weights, as far as the bounds allow.

    Finds the factor with which :math:`\sum_i clip(factor \cdot w_i, lower_i, upper_i) = total` and
    rounds by largest remainders, ties to the lowest index. When all replicas with a positive weight
    are at their upper bounds, the others take the rest evenly.

    Args:
        total: samples to share out.
        weights: one weight for each replica, zero or more, at least one of them positive.
        lower: smallest share of each replica; by default 0.
        upper: largest share of each replica; by default the total.

    Returns:
        Shares, int64 [num_replicas], which sum to the total.

    Raises:
        TypeError: if a bound or the total is not whole.
        ValueError: if no shares fit, or a weight is not valid.
    """
    low, high = check_bounds(total, len(weights), lower, upper)
    weight = np.asarray(weights, np.float64)
    if not (np.isfinite(weight) & (weight >= 0)).all() or not weight.any():
        exact_weights(weight.tolist())  # raises the precise error
    positive = weight > 0
    weight = np.where(positive, np.maximum(weight / weight.max(), 1e-12), 0.0)
    if high[positive].sum() + low[~positive].sum() < total:
        # All replicas with a weight are full: the rest goes evenly to the others.
        shares = np.where(positive, high, 0)
        rest = total - int(shares.sum())
        shares[~positive] = proportional_shares(
            rest, np.ones(int((~positive).sum())), low[~positive], np.minimum(high, rest)[~positive]
        )
        return shares
    return _round(total, _scaled(total, weight, low, high), low, high)


def _scaled(total: int, weight: FloatArray, low: IntArray, high: IntArray) -> FloatArray:
    """Return real-valued shares clip(factor * weight) that sum to the total, up to rounding."""
    # Their sum is piecewise linear in the factor: a share grows from its lower bound to its upper
    # one.
    divisor = np.where(weight > 0, weight, 1.0)
    factors = np.concatenate([low / divisor, high / divisor])
    order = np.argsort(factors, kind="stable")
    factors = factors[order]
    growth = np.cumsum(np.concatenate([weight, -weight])[order])
    sums = low.sum() + np.concatenate([[0.0], np.cumsum(growth[:-1] * np.diff(factors))])
    piece = max(int(np.searchsorted(sums, total)) - 1, 0)
    rise = growth[piece]
    factor = factors[piece] + ((total - sums[piece]) / rise if rise > 1e-15 else 0.0)
    return np.clip(factor * weight, low, high)


def _round(total: int, real: FloatArray, low: IntArray, high: IntArray) -> IntArray:
    # The tolerance keeps 2.9999999 from counting as a remainder among true ties.
    whole = np.floor(real + 1e-9).astype(np.int64)
    by_remainder = np.argsort(-np.round(real - whole, 9), kind="stable")
    left = total - int(whole.sum())
    while left:
        room = whole < high if left > 0 else whole > low
        takers = (by_remainder if left > 0 else by_remainder[::-1])[room[by_remainder]][: abs(left)]
        whole[takers] += 1 if left > 0 else -1
        left = total - int(whole.sum())
    return whole


def _whole_numbers(name: str, values: ArrayLike, length: int) -> IntArray:
    given = np.asarray(values)
    array = np.broadcast_to(given, (length,)) if given.ndim == 0 else given
    if array.shape != (length,):
        raise ValueError(
            f"{name} must have one number for each of {length} replicas. "
            f"Received: shape {given.shape}."
        )
    if array.dtype.kind not in "iuf" or (np.asarray(array, np.float64) % 1 != 0).any():
        raise TypeError(f"{name} must hold whole numbers of samples. Received: {values!r}.")
    return np.minimum(array, MAX_TOTAL).astype(np.int64)


def assign_files(sizes: Sequence[int], weights: Sequence[float]) -> tuple[tuple[int, ...], ...]:
    """Assign whole files to workers such that samples are about in proportion to weights."""
    # Largest first, to the worker farthest below its ideal. A worker differs from its ideal by at
    # most the largest file: one that gets a file was not above its ideal, and were one short by
    # more at the end, each file would have gone to workers as short, and all would be short.
    if any(size < 0 for size in sizes):
        raise ValueError(f"Sizes of files must be zero or more samples. Received: {list(sizes)}.")
    exact = exact_weights(weights)
    total, weight_sum = sum(sizes), sum(exact)
    missing = [total * weight / weight_sum for weight in exact]
    eligible = [worker for worker, weight in enumerate(exact) if weight]
    assigned: list[list[int]] = [[] for _ in exact]
    for file in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        worker = max(eligible, key=lambda index: (missing[index], -index))
        assigned[worker].append(file)
        missing[worker] -= sizes[file]
    return tuple(tuple(sorted(files)) for files in assigned)


def shares_of_own_samples(
    total: int,
    weights: Sequence[float],
    replicas_per_worker: Sequence[int],
    remaining: Sequence[int],
) -> tuple[int, ...]:
    """Return shares of a step when each worker can use only samples of its own files."""
    # A worker whose replicas all have weight zero helps only when all others have run out.
    total = min(total, sum(remaining))
    exact = exact_weights(weights)
    ends = itertools.accumulate(replicas_per_worker)
    parts = [exact[end - count : end] for end, count in zip(ends, replicas_per_worker, strict=True)]
    given = [0] * len(parts)
    left = total
    while left:
        open_workers = [worker for worker in range(len(parts)) if given[worker] < remaining[worker]]
        pulls = [sum(parts[worker], Fraction()) for worker in open_workers]
        if not any(pulls):
            pulls = [Fraction(1)] * len(open_workers)
        wanted = apportion(left, pulls)
        for worker, more in zip(open_workers, wanted, strict=True):
            given[worker] += min(more, remaining[worker] - given[worker])
        left = total - sum(given)
    shares: list[int] = []
    for part, samples in zip(parts, given, strict=True):
        shares += apportion(samples, part if any(part) else [1] * len(part))
    return tuple(shares)
