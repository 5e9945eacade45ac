"""Memory of a stage, and the cheapest set of units to recompute until it fits."""

# With d micro-batches between forward and backward, the activations a of recomputed units X are
# there for one of them, the one whose backward pass is running; for each run of neighbouring units
# in X, the tensors c that cross the cut before it are kept instead. This frees (d - 1) sum_X a - d
# sum_runs c bytes and takes the forward time of X once more. The choice of X is a knapsack over the
# chain of units, solved exactly over sets that no other set dominates.
# Zhan and Zhang, "Pipe-Torch", CBD 2019; Chen et al., "Training Deep Nets with Sublinear Memory
# Cost", arXiv:1604.06174.

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from keras_het.planning.pipeline.problem import TINY, Group, ModelProfile, Problem
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


def cheapest_recomputation(
    profile: ModelProfile,
    first: int,
    end: int,
    in_flight: Sequence[int],
    limits: Sequence[float],
    unit_seconds: FloatArray,
) -> tuple[int, ...] | None:
    """Return the cheapest set of units to recompute so that every replica of a stage fits."""
    # Exact for replicas with equal numbers of micro-batches in flight; otherwise for the strictest
    # condition of all. Of more than 1,024 undominated sets, those are kept that free evenly spaced
    # bytes.
    over = [
        stage_memory(profile, first, end, d) - limit * (1 + _ROUNDING)
        for d, limit in zip(in_flight, limits, strict=True)
    ]
    lacking = [(excess, d) for excess, d in zip(over, in_flight, strict=True) if excess > 0]
    if not lacking:
        return ()
    if any(d < 2 for _, d in lacking):
        return None
    # The strictest sides of (d - 1) a(X) - d c(X) >= excess, divided by d - 1.
    ratio = max(d / (d - 1) for _, d in lacking)
    chosen = _cheapest_chain(
        profile.activation_bytes[first:end],
        ratio * profile.cut_bytes[first:end],
        unit_seconds[first:end],
        max(excess / (d - 1) for excess, d in lacking),
    )
    if chosen is None:
        return None
    units = tuple(first + unit for unit in chosen)
    held = [stage_memory(profile, first, end, d, units) for d in in_flight]
    return units if all(map(fits, held, limits)) else None


def _cheapest_chain(
    freed: FloatArray, start: FloatArray, seconds: FloatArray, need: float
) -> list[int] | None:
    """Return the cheapest X with sum of `freed` minus `start` of each run of X >= need, or None."""
    if freed.sum() < need:
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


class Memory:
    """What the stages of a problem recompute."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        profile = problem.profile
        self._activations = profile.activation_bytes.tolist()
        self._state = profile.state_bytes.tolist()
        self._crossing = profile.cut_bytes.tolist()
        self._limits = problem.devices.memory_bytes.tolist()
        self._unit_seconds = functools.cache(self._seconds)
        self.least = functools.cache(self._least)
        self.recomputed = functools.cache(self._recomputed)

    def _least(self, first: int, end: int, group: Group, held: Group) -> tuple[float, float]:
        """Return the bytes that lack at least, and the least part of forward time to recompute."""
        recompute = self._problem.recompute
        state, kept = sum(self._state[first:end]), sum(self._activations[first:end])
        limits = [self._limits[device] * (1 + _ROUNDING) for device in group]
        over = [state + d * kept - limit for d, limit in zip(held, limits, strict=True)]
        saved = [0.0] * len(held)
        start = self._crossing[first]
        if recompute == "always":
            saved = [(d - 1) * kept - d * start for d in held]
        elif recompute == "auto" and max(over) > 0:
            start = min(self._crossing[first:end])
            saved = [max(0.0, (d - 1) * kept - d * start) for d in held]
        lacking = sum(max(0.0, each - less) for each, less in zip(over, saved, strict=True))
        if lacking or recompute != "auto" or max(over) <= 0:
            return lacking, 0.0
        # The cheapest fractions of units.
        need = max((o + d * start) / (d - 1) for o, d in zip(over, held, strict=True) if o > 0)
        seconds, again = self._unit_seconds(group)[first:end].tolist(), 0.0
        units = zip(seconds, self._activations[first:end], strict=True)
        for rate, freed in sorted((spent / freed, freed) for spent, freed in units if freed > 0):
            again += rate * max(0.0, min(need, freed))
            need -= freed
        return 0.0, again / max(sum(seconds), TINY)

    def _recomputed(self, first: int, end: int, group: Group, held: Group) -> Group | None:
        """Return the units that make every replica fit, the cheapest ones, or None."""
        profile, recompute = self._problem.profile, self._problem.recompute
        limits = [self._limits[device] for device in group]
        if recompute == "auto":
            seconds = self._unit_seconds(group)
            return cheapest_recomputation(profile, first, end, held, limits, seconds)
        units = tuple(range(first, end)) if recompute == "always" else ()
        needed = [stage_memory(profile, first, end, d, units) for d in held]
        return units if all(map(fits, needed, limits)) else None

    def _seconds(self, group: Group) -> FloatArray:
        """Return the seconds that recomputing a unit costs: a mean weighted by speed, [L]."""
        profile, members = self._problem.profile, list(group)
        forward = profile.forward_seconds[:, members]
        seconds = (forward + profile.backward_seconds[:, members]).sum(axis=0)
        speeds = 1 / np.maximum(seconds, TINY)
        cost: FloatArray = forward @ (speeds / speeds.sum())
        return cost
