r"""Memory of a stage, and the cheapest set of units to recompute until it fits.

A replica holds, with d micro-batches between forward and backward,

.. math:: \sum_l state_l + d \sum_{l \notin X} a_l + \sum_{l \in X} a_l + d \sum_{runs} c_{start}

bytes: the activations a of recomputed units X are there for one micro-batch, the one whose backward
pass is running; for each run of neighbouring units in X, the tensors c that cross the cut before it
are kept instead. Recomputing X frees

.. math:: (d - 1) \sum_{l \in X} a_l - d \sum_{runs} c_{start}

bytes and takes the forward time of X once more. The paper's "cost-balanced recomputation" has this
time inside the stage's time when stages are balanced; the choice of X here is a knapsack over the
chain of units, solved exactly by dynamic programming over sets that no other set dominates.

References:
    Zhan and Zhang, "Pipe-Torch: Pipeline-Based Distributed Deep Learning in a GPU Cluster with
    Heterogeneous Networking", CBD 2019.
    Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, arXiv:1604.06174.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from keras_het.planning.pipeline.problem import ModelProfile
from keras_het.planning.shares import FloatArray, IntArray

# Sets that are kept for each number of units.
_MOST_SETS = 1024
# Bytes are sums of floats here and elsewhere, in different orders.
_ROUNDING = 1e-9


def stage_memory(
    profile: ModelProfile, first: int, end: int, in_flight: int, recomputed: Sequence[int] = ()
) -> float:
    chosen = np.zeros(profile.num_units + 1, bool)
    chosen[list(recomputed)] = True
    units = slice(first, end)
    starts = chosen[units].copy()
    starts[1:] &= ~chosen[first : end - 1]
    copies = np.where(chosen[units], 1, in_flight)
    return float(
        profile.state_bytes[units].sum()
        + copies @ profile.activation_bytes[units]
        + in_flight * profile.cut_bytes[units][starts].sum()
    )


def fits(needed: float, limit: float) -> bool:
    return needed <= limit * (1 + _ROUNDING)


def needed_savings(
    without: FloatArray, limits: FloatArray, in_flight: FloatArray | IntArray
) -> tuple[FloatArray, float]:
    """Return need and ratio of the one condition a(X) - ratio c(X) >= need.

    It has the strictest sides of (d_k - 1) a(X) - d_k c(X) >= excess_k, divided by d_k - 1, over k.
    """
    excess = np.asarray(without - limits * (1 + _ROUNDING))
    over = excess > 0
    with np.errstate(divide="ignore", invalid="ignore"):
        needs = np.where(over, excess / np.maximum(in_flight - 1, 0), 0.0)
    helped = over & (in_flight > 1)
    least = in_flight[helped].min() if helped.any() else 2.0
    return needs.max(axis=0), float(least / (least - 1))


def cheapest_recomputation(
    profile: ModelProfile,
    first: int,
    end: int,
    in_flight: Sequence[int],
    limits: Sequence[float],
    unit_seconds: FloatArray,
) -> tuple[int, ...] | None:
    """Return the cheapest set of units to recompute so that every replica of a stage fits.

    Exact for replicas with equal numbers of micro-batches in flight; otherwise for the strictest
    condition of all replicas. Of more than 1,024 sets that no other set dominates, those are kept
    that free evenly spaced numbers of bytes.
    """
    flights, most = np.asarray(in_flight, np.float64), np.asarray(limits, np.float64)
    without = np.array([stage_memory(profile, first, end, d) for d in in_flight])
    if all(map(fits, without, most)):
        return ()
    need, ratio = needed_savings(without, most, flights)
    chosen = _cheapest_chain(
        profile.activation_bytes[first:end],
        ratio * profile.cut_bytes[first:end],
        unit_seconds[first:end],
        float(need),
    )
    if chosen is None:
        return None
    units = tuple(first + unit for unit in chosen)
    held = [stage_memory(profile, first, end, d, units) for d in in_flight]
    return units if all(map(fits, held, most)) else None


def _cheapest_chain(
    freed: FloatArray, start: FloatArray, seconds: FloatArray, need: float
) -> list[int] | None:
    """Return the cheapest X with sum of `freed` minus `start` of each run of X >= need, or None."""
    if not np.isfinite(need) or freed.sum() < need:
        return None
    left = np.append(np.cumsum(freed[::-1])[::-1], 0.0)
    # Freed bytes and seconds of the sets without and with the last unit that no set dominates; for
    # the way back the number of the set before, where those without come first.
    fronts = [(np.zeros(1), np.zeros(1)), (np.zeros(0), np.zeros(0))]
    origins: list[tuple[IntArray, IntArray, int]] = []
    for unit in range(len(freed)):
        bytes_before, seconds_before = map(np.concatenate, zip(*fronts, strict=True))
        number_without = len(fronts[0][0])
        new_run = np.arange(len(bytes_before)) < number_without
        taken = bytes_before + freed[unit] - np.where(new_run, start[unit], 0.0)
        useful = need - left[unit + 1]
        rows = _undominated(bytes_before, seconds_before, useful)
        taking = _undominated(taken, seconds_before + seconds[unit], useful)
        origins.append((rows, taking, number_without))
        fronts = [
            (bytes_before[rows], seconds_before[rows]),
            (taken[taking], seconds_before[taking] + seconds[unit]),
        ]
    ends = [
        (float(spent[row]), kind, int(row))
        for kind, (freed_bytes, spent) in enumerate(fronts)
        for row in np.flatnonzero(freed_bytes >= need)
    ]
    if not ends:
        return None
    _, kind, row = min(ends)
    chosen = []
    for unit in reversed(range(len(freed))):
        rows, taking, number_without = origins[unit]
        if kind:
            chosen.append(unit)
        before = int((taking if kind else rows)[row])
        kind = int(before >= number_without)
        row = before - number_without * kind
    return chosen[::-1]


def _undominated(freed: FloatArray, seconds: FloatArray, least: float) -> IntArray:
    """Return rows that free at least `least`, and for which no other row frees as much for less."""
    rows = np.flatnonzero(freed >= least)
    rows = rows[np.lexsort((-freed[rows], seconds[rows]))]
    if not len(rows):
        return rows
    most = np.maximum.accumulate(freed[rows])
    kept: IntArray = rows[np.append(True, freed[rows][1:] > most[:-1])]
    if len(kept) > _MOST_SETS:
        # Of the sets that free nearly the same, the cheapest; always the one that frees most.
        marks = np.linspace(freed[kept[0]], freed[kept[-1]], _MOST_SETS)
        kept = kept[np.unique(np.searchsorted(freed[kept], marks))]
    return kept


def least_recomputation_seconds(
    activations: FloatArray,
    unit_seconds: FloatArray,
    bounds: tuple[IntArray, IntArray],
    starts: FloatArray,
    stages: IntArray,
    need: FloatArray,
    in_flight: IntArray,
) -> FloatArray:
    """Return lower bounds of the time to recompute: that of the cheapest fractions of units.

    `bounds` has the first unit and the end of every stage, and `starts` the fewest bytes that cross
    a cut in it. There is a number for each of `stages`, which may repeat; infinite if none helps.
    """
    useful = np.flatnonzero(activations > 0)
    rates = unit_seconds[useful] / activations[useful]
    cheapest = useful[np.argsort(rates, kind="stable")][:, None]
    rates = np.append(np.sort(rates, kind="stable"), np.inf)
    # Sums over those of the cheapest units that are in the stage, [units + 1, stages].
    inside = (bounds[0] <= cheapest) & (cheapest < bounds[1])
    freed, spent = (
        np.append(np.zeros((1, len(starts))), np.cumsum(inside * each[cheapest], axis=0), axis=0)
        for each in (activations, unit_seconds)
    )
    need = need + starts[stages] * in_flight / np.maximum(in_flight - 1, 1)
    # How many units free less than is needed, by halving.
    low, high = np.zeros(len(stages), np.int64), np.full(len(stages), len(cheapest))
    while (low < high).any():
        middle = (low + high + 1) // 2
        less = freed[middle, stages] < need
        low, high = np.where(less, middle, low), np.where(less, high, middle - 1)
    left = need - freed[low, stages]
    with np.errstate(invalid="ignore"):
        seconds: FloatArray = (spent[low, stages] + left * rates[low]) * (1 - 1e-12)
    return seconds
