"""Shares with which the slowest replica finishes as early as possible."""

# The largest shares that all replicas finish within T grow with T: bisection finds the smallest T
# at which they sum to the total. It bisects the bit patterns of T, which are ordered like the
# numbers, and therefore ends exactly, after at most 63 halvings.

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from keras_het.planning.argument_checks import check_number
from keras_het.planning.shares import (
    FloatArray,
    IntArray,
    check_bounds,
    proportional_shares,
)

Times = Callable[[IntArray], FloatArray]


def min_max_shares(
    times: Times, total: int, lower: ArrayLike, upper: ArrayLike | None = None
) -> IntArray:
    """Solve the min-max program for any nondecreasing time functions.

    A replica with share 0 is unused and takes no time, whatever its fixed cost: this is how the
    program drops a device that is not worth using. A lower bound above 0 forces the use of a
    replica; the time of its lower bound is then unavoidable, and among the remaining samples the
    slowest replica above its lower bound is made as fast as possible, which is also optimal.

    The result depends only on the numbers: samples whose placement does not change the optimum are
    spread in proportion to the replicas' room, ties to the lowest index.

    Args:
        times: maps shares, int64 [n], each at least 1, to the replicas' times, float64 [n], finite
            and at least 0; nondecreasing in each share. Entry i depends on share i alone.
        total: samples of the global batch.
        lower: smallest share of each replica, [n].
        upper: largest share of each replica, [n]; by default the total.

    Returns:
        Optimal shares, int64 [n]; they sum to `total`.

    Raises:
        TypeError: if bounds or total are not whole numbers.
        ValueError: if no shares satisfy the bounds, or `times` does not return n times.

    Reference:
        The min-max integer program: Yang, Kang and Youn, "BOA: batch orchestration algorithm for
        straggler mitigation of distributed DL training in heterogeneous GPU cluster", The Journal
        of Supercomputing 76, 2020. The solution by bisection is specific to this package.
    """
    low, high = check_bounds(total, np.size(lower), np.atleast_1d(lower), upper)
    checked = _checked(times, len(low))
    return _solve(checked, int(total), low, high)


def min_max_shares_linear(
    fixed_seconds: ArrayLike,
    seconds_per_sample: ArrayLike,
    total: int,
    lower: ArrayLike | None = None,
    upper: ArrayLike | None = None,
) -> IntArray:
    """Solve the min-max program for linear times, `fixed + slope * shares`.

    Args:
        fixed_seconds: time of a step without samples, [n], at least 0.
        seconds_per_sample: additional time of a sample, [n], at least 0.
        total: samples of the global batch.
        lower: smallest share of each replica, [n]; by default 0.
        upper: largest share of each replica, [n]; by default the total.

    Returns:
        Optimal shares, int64 [n]; they sum to `total`.

    Raises:
        TypeError: if bounds or total are not whole numbers.
        ValueError: if a time is negative or not finite, or no shares satisfy the bounds.
    """
    fixed, slope = np.broadcast_arrays(
        np.atleast_1d(np.asarray(fixed_seconds, np.float64)),
        np.asarray(seconds_per_sample, np.float64),
    )
    if not (np.isfinite(fixed) & np.isfinite(slope) & (fixed >= 0) & (slope >= 0)).all():
        raise ValueError(
            "Times of replicas must be finite and at least 0. Received: "
            f"fixed_seconds={fixed_seconds!r}, seconds_per_sample={seconds_per_sample!r}. "
            "Measure the devices again."
        )
    low, high = check_bounds(total, len(fixed), lower, upper)
    return min_max_shares(lambda shares: fixed + slope * shares, total, low, high)


def _solve(times: Times, total: int, lower: IntArray, upper: IntArray) -> IntArray:
    if total in (lower.sum(), upper.sum()):
        return lower.copy() if total == lower.sum() else upper.copy()
    # Invariant: all of `below` finishes within `low_bits` and has too few samples; all of `above`
    # finishes within `high_bits` and has enough. A share at its lower bound always finishes.
    low_bits, high_bits = _bracket(times, total, lower, upper)
    above = bisect_shares(times, _from_bits(high_bits), lower, upper)
    below = lower if low_bits < 0 else bisect_shares(times, _from_bits(low_bits), lower, above)
    while high_bits - low_bits > 1 and (above - below).max() > 1:
        middle_bits = (low_bits + high_bits) // 2
        middle = bisect_shares(times, _from_bits(middle_bits), below, above)
        samples = int(middle.sum())
        if samples == total:
            return middle
        if samples > total:
            high_bits, above = middle_bits, middle
        else:
            low_bits, below = middle_bits, middle
    return _finish(times, total, below, above, high_bits - low_bits > 1)


def _bracket(times: Times, total: int, lower: IntArray, upper: IntArray) -> tuple[int, int]:
    """Return the bits of a time that is too short and of one that is sufficient."""
    # Other shares with the same sum give some replica more: none is faster than the smallest time
    # with one more sample.
    even = proportional_shares(total, np.ones(len(lower)), lower, upper)
    even_times = times(np.maximum(even, 1))
    shortest_counted = max(float(even_times.max()) / 1e9, 1e-200)
    speed = np.maximum(even, 1) / np.maximum(even_times, shortest_counted)
    guess = proportional_shares(total, speed, lower, upper)
    seconds = np.where(guess > lower, times(np.maximum(guess, 1)), 0.0)
    longest = float(seconds.max())
    more = np.minimum(guess + 1, upper)
    next_seconds = times(np.maximum(more, 1))[guess < upper]
    shortest = min(float(next_seconds.min()), longest)
    return _to_bits(shortest) - 1, _to_bits(longest)


def _finish(times: Times, total: int, below: IntArray, above: IntArray, choose: bool) -> IntArray:
    """Place the samples between `below` and `above`."""
    # With `choose`, no replica has room for more than one sample, and their times differ; otherwise
    # all of them take equally long.
    room = above - below
    missing = total - int(below.sum())
    if choose:
        seconds = np.where(room > 0, times(np.maximum(above, 1)), np.inf)
        longest = np.partition(seconds, missing - 1)[missing - 1]
        below = below + (seconds < longest)
        room = (seconds == longest).astype(np.int64)
        missing = total - int(below.sum())
    return below + _spread(missing, room)


def _spread(samples: int, room: IntArray) -> IntArray:
    """Split samples in proportion to the room, by largest remainders in whole numbers."""
    whole, remainder = np.divmod(samples * room, max(int(room.sum()), 1))
    first = np.argsort(-remainder, kind="stable")[: samples - int(whole.sum())]
    whole[first] += 1
    return whole


def bisect_shares(times: Times, threshold: float, low: IntArray, high: IntArray) -> IntArray:
    """Return the largest shares in [low, high] that finish within a time; `low` always does."""
    while (undecided := low < high).any():
        middle = (low + high + 1) // 2
        fits = times(np.maximum(middle, 1)) <= threshold
        low = np.where(undecided & fits, middle, low)
        high = np.where(undecided & ~fits, middle - 1, high)
    return low


def _checked(times: Times, num_replicas: int) -> Times:
    def call(shares: IntArray) -> FloatArray:
        seconds = np.asarray(times(shares), np.float64)
        if seconds.shape != (num_replicas,) or not (seconds >= 0).all() or np.isinf(seconds).any():
            raise ValueError(
                f"times must return {num_replicas} finite seconds, at least 0. "
                f"Received: {seconds!r} for shares {shares!r}. Use upper bounds for shares that a "
                "replica cannot have."
            )
        return seconds

    return call


def _to_bits(seconds: float) -> int:
    # The addition turns -0.0 into 0.0.
    return int(np.float64(seconds + 0.0).view(np.int64))


def _from_bits(bits: int) -> float:
    return float(np.int64(bits).view(np.float64))


Granularity = int | Literal["auto"]
"""Samples of which shares are multiples, or "auto" for the coarsest that costs little balance."""
COARSEST = 8
MOST_LOSS = 0.02


def check_granularity(given: object) -> None:
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

    def _sums(self, values: ArrayLike) -> IntArray:
        """Sum over all replicas, for each one that might take the rest."""
        without, taking = np.asarray(values, np.int64)
        result: IntArray = without.sum() - without + taking
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
