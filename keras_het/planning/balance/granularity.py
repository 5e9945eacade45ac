"""Shares that are multiples of a granularity, but for one that takes the rest of the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from keras_het.planning.argument_checks import check_number
from keras_het.planning.balance.min_max import Times, bisect_shares, min_max_shares
from keras_het.planning.shares import FloatArray, IntArray, proportional_shares

Granularity = int | Literal["auto"]
"""Samples of which shares are multiples, or "auto" for the coarsest that costs little balance."""
COARSEST = 8
MOST_LOSS = 0.02


def check_granularity(given: Any) -> None:
    if not isinstance(given, str) or given != "auto":
        check_number("granularity", given, least=1, whole=True, otherwise=', or "auto"')


def coarsest(granularity: Granularity) -> int:
    return COARSEST if granularity == "auto" else int(granularity)


def coarse_shares(
    granularity: Granularity,
    finest: IntArray,
    solve: Callable[[int], IntArray | None],
    seconds: Callable[[IntArray], float],
) -> IntArray:
    """Return the shares of the coarsest granularity that bounds and balance allow."""
    # Matrix units of GPUs want multiples of 8, and each size of a share is compiled or tuned once.
    # "auto" takes the first of 8, 4, 2 and 1 with at most 1.02 times the seconds of granularity 1.
    most = coarsest(granularity)
    allowed = (1 + MOST_LOSS) * seconds(finest) if granularity == "auto" else np.inf
    for size in (size for size in range(most, 1, -1) if most % size == 0):
        shares = solve(size)
        if shares is not None and seconds(shares) <= allowed:
            return shares
    return finest


def min_max_multiples(
    times: Times, total: int, size: int, lower: IntArray, upper: IntArray
) -> IntArray | None:
    """Solve the min-max program over multiples of `size`, and who takes the rest, exactly."""
    # With granularity g, rest r = B mod g and shares g u_i, for one replica k g u_k + r: min over k
    # and u of max_i t_i(g u_i + r [i = k]) with sum u_i = (B - r) / g. Solved for one k, and for
    # another one only if that would be faster.
    units = _Units(total, size, lower, upper)
    best, least, taker = None, np.inf, units.first_taker(times)
    while taker is not None:
        low, high = units.bounds(taker)
        found = min_max_shares(units.times(times, taker), units.count, low, high)
        shares = units.shares(found, taker)
        seconds = float(np.where(shares > 0, times(np.maximum(shares, 1)), 0.0).max())
        if seconds >= least:
            break
        best, least, taker = shares, seconds, units.faster_taker(times, seconds)
    return best


def proportional_multiples(
    weights: FloatArray, total: int, size: int, lower: IntArray, upper: IntArray
) -> IntArray | None:
    """Return multiples in proportion to weights; the heaviest replica takes the rest."""
    units = _Units(total, size, lower, upper)
    if not units.can_take.any():
        return None
    taker = int(np.where(units.can_take, weights, -1.0).argmax())
    return units.shares(proportional_shares(units.count, weights, *units.bounds(taker)), taker)


class _Units:
    """The program in units of `size` samples; its methods have a row for those without the rest."""

    def __init__(self, total: int, size: int, lower: IntArray, upper: IntArray) -> None:
        self._size = size
        self.count, self._rest = divmod(int(total), size)
        rests = np.array([[0], [self._rest]])
        self._low = -(-np.maximum(lower - rests, 0) // size)
        self._high = (np.minimum(upper, total) - rests) // size
        fits = self._low <= self._high
        enough = self._sums(self._low) <= self.count
        self.can_take = fits[1] & (self._sums(~fits) == ~fits[1]) & enough
        """Whether shares are within the bounds if this replica takes the rest, bool [n]."""
        self.can_take &= self.count <= self._sums(self._high)

    def _sums(self, values: Any) -> IntArray:
        """Sum over all replicas, for each one that might take the rest."""
        values = np.asarray(values, np.int64)
        result: IntArray = values[0].sum() - values[0] + values[1]
        return result

    def bounds(self, taker: int) -> tuple[IntArray, IntArray]:
        takes = np.arange(len(self.can_take)) == taker
        return np.where(takes, *self._low[::-1]), np.where(takes, *self._high[::-1])

    def shares(self, units: IntArray, taker: int) -> IntArray:
        shares = units * self._size
        shares[taker] += self._rest
        return shares

    def times(self, times: Times, taker: int) -> Times:
        return lambda units: times(self.shares(units, taker))

    def first_taker(self, times: Times) -> int | None:
        if not self.can_take.any():
            return None
        alone = times(np.maximum(self._low[1], 1) * self._size)
        return int(np.where(self.can_take, alone, np.inf).argmin())

    def faster_taker(self, times: Times, seconds: float) -> int | None:
        """Return a replica with which a step takes less than `seconds`, if there is one."""
        if self._rest == 0:
            return None
        below, most, late = float(np.nextafter(seconds, 0.0)), [], []
        for low, high, rest in zip(self._low, self._high, (0, self._rest), strict=True):
            least = low * self._size + rest
            late.append((least > 0) & (times(np.maximum(least, 1)) > below))

            def unit_times(units: IntArray, rest: int = rest) -> FloatArray:
                return times(units * self._size + rest)

            most.append(bisect_shares(unit_times, below, low, np.maximum(high, low)))
        could = self.can_take & (self._sums(most) >= self.count) & (self._sums(late) == 0)
        room = np.where(could, most[1] - most[0], -self.count - 2)
        return int(room.argmax()) if could.any() else None
