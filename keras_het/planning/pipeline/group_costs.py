r"""Costs of all stages that a group of devices could run, as the dynamic program sees them.

Replica k takes t_k for a micro-batch of the stage and gets n_k of the M micro-batches, as `routes`
would give them. The estimate of a step is

.. math:: \max(\max_s steady_s, \max_c steady_c) + \sum_s latency_s + \sum_c latency_c + \max_s AR_s

.. math::
    latency_s = \sum_k n_k t_k / M, \qquad steady_s = \max_k n_k t_k - latency_s

that is: the busiest stage works without a pause, and the first and the last micro-batch pass
through all others (DAPPLE's latency with a pivot stage). A transfer c counts as a stage whose
micro-batches are spread evenly over all pairs of replicas. With one stage the estimate is exact.

Recomputation of units X multiplies both by (latency + R) / latency, where R is the mean of the
replicas' times for X, weighted by their speed. For every possible stage there is a lower bound of R
(the fractional knapsack); `exact` finds R itself, for the stages that matter.
"""

from __future__ import annotations

import numpy as np

from keras_het.planning.bounded_shares import FloatArray, IntArray
from keras_het.planning.pipeline.problem import TINY, Problem
from keras_het.planning.pipeline.recomputation import (
    cheapest_recomputation,
    least_recomputation_seconds,
    needed_savings,
)


class GroupCosts:
    """Costs of the stages between any two cuts, as replicas on a group of devices.

    How much a stage recomputes depends on how many micro-batches are in flight, and so on its
    window: the number of devices from the stage on. Windows with the same costs share a variant.
    """

    def __init__(self, problem: Problem, group: tuple[int, ...]) -> None:
        self._problem, members = problem, list(group)
        profile, cuts = problem.profile, np.asarray(problem.cuts)
        self._rows, self._columns = np.triu_indices(len(cuts), 1)
        if problem.all_cuts:
            self._rows, self._columns = np.arange(len(cuts) - 1), np.arange(1, len(cuts))
        self._first, self._end = cuts[self._rows], cuts[self._columns]
        forward = profile.forward_seconds[:, members]
        seconds = forward + profile.backward_seconds[:, members]
        if problem.recompute == "always":
            seconds = seconds + forward
        times = np.maximum(self._sums(seconds).T, TINY)
        counts = _counts(times, problem.micro_batches)
        totals = counts * times
        self._latency = totals.sum(axis=0) / problem.micro_batches
        self._steady = np.maximum(totals.max(axis=0) - self._latency, 0.0)
        self._limits = problem.devices.memory_bytes[members]
        self._unit_seconds = problem.recomputation_seconds(group)
        windows = np.arange(len(group), max(len(group), problem.devices.num_devices) + 1)
        flights = self._in_flight(times, counts, windows)
        # More devices mean more micro-batches in flight, or as many.
        new = np.append(True, (flights[1:] != flights[:-1]).any(axis=(1, 2)))
        self.variants: IntArray = np.cumsum(new) - 1
        self._flights = flights[new]
        again, exact = self._recomputation()
        possible = (counts > 0).all(axis=0)
        factor = np.where(possible, (self._latency + again) / self._latency, np.inf)
        self.steady = self._table(_times(self._steady, factor))
        self.latency = self._table(_times(self._latency, factor))
        self._exact = self._table(exact) == 1
        weights = self._sums(profile.weight_bytes)
        fixed, per_byte = problem.devices.all_reduce_terms(group)
        self.all_reduce = self._table(np.where(weights > 0, fixed + weights * per_byte, 0.0))

    def exact(self, variant: int, row: int, column: int) -> bool:
        """Make the costs of one stage exact; return whether they were so already."""
        if self._exact[variant, row, column]:
            return True
        self._exact[variant, row, column] = True
        stage = int(np.flatnonzero((self._rows == row) & (self._columns == column))[0])
        chosen = cheapest_recomputation(
            self._problem.profile,
            int(self._first[stage]),
            int(self._end[stage]),
            self._flights[variant, :, stage].tolist(),
            self._limits.tolist(),
            self._unit_seconds,
        )
        again = np.inf if chosen is None else self._unit_seconds[list(chosen)].sum()
        factor = np.asarray(1 + again / self._latency[stage])
        before = self.latency[variant, row, column]
        self.steady[variant, row, column] = _times(self._steady[stage], factor)
        self.latency[variant, row, column] = _times(self._latency[stage], factor)
        return bool(np.isclose(before, self.latency[variant, row, column], 1e-12, 0))

    def _sums(self, values: FloatArray) -> FloatArray:
        """Return the sum over the units of each stage, [stages, ...]."""
        total = np.concatenate([np.zeros((1, *values.shape[1:])), np.cumsum(values, axis=0)])
        difference: FloatArray = total[self._end] - total[self._first]
        return difference

    def _table(self, values: FloatArray) -> FloatArray:
        """Return numbers of each stage as tables over cuts, [..., Q, Q]."""
        size = len(self._problem.cuts)
        table = np.full((*values.shape[:-1], size, size), np.inf)
        table[..., self._rows, self._columns] = values
        return table

    def _in_flight(self, times: FloatArray, counts: IntArray, windows: IntArray) -> IntArray:
        """Return at least the micro-batches in flight, int64 [windows, replicas, stages].

        While a replica finishes c of them, replica k finishes at least floor((c - 1) t / t_k)
        others, and all of them are in the window.
        """
        if np.isinf(self._limits).all():
            return np.ones((len(windows), *counts.shape), np.int64)
        if self._problem.schedule == "gpipe":
            return np.repeat(counts[None], len(windows), axis=0)
        looks = [row.tobytes() for row in times]
        kinds = {look: number for number, look in enumerate(dict.fromkeys(looks))}
        kind = np.array([kinds[look] for look in looks])
        first = [looks.index(look) for look in kinds]
        number = np.bincount(kind)
        # Micro-batches of each kind of device in the time of one of each kind.
        rates = times[first][:, None] / times[first] * (1 + 1e-12)
        flights = np.ones((len(windows), *times[first].shape), np.int64)
        for c in range(2, int(windows[-1]) + 1):
            others = np.einsum("v,uvp->up", number, np.floor((c - 1) * rates)) - (c - 1)
            more = c + others <= windows[:, None, None]
            if not more.any():
                break
            flights += more
        flights[windows == len(times)] = 1
        return np.minimum(counts, flights[:, kind])

    def _recomputation(self) -> tuple[FloatArray, FloatArray]:
        """Return a lower bound of the time to recompute, [variants, stages], and 1 where exact."""
        profile, recompute = self._problem.profile, self._problem.recompute
        flights = self._flights.swapaxes(0, 1)
        limits = self._limits[:, None, None]
        activations = self._sums(profile.activation_bytes)
        held = self._sums(profile.state_bytes) + activations * np.ones_like(flights)
        if recompute == "always":
            need, _ = needed_savings(
                held + flights * profile.cut_bytes[self._first], limits, np.ones_like(flights)
            )
        else:
            need, _ = needed_savings(held + (flights - 1) * activations, limits, flights)
        again, exact = np.where(need > 0, np.inf, 0.0), np.ones(need.shape)
        short = (need > 0) & np.isfinite(need)
        if recompute == "auto" and short.any():
            again[short] = least_recomputation_seconds(
                profile.activation_bytes,
                self._unit_seconds,
                (self._first, self._end),
                self._problem.least_cuts[self._rows, self._columns],
                np.nonzero(short)[1],
                need[short],
                flights.max(axis=0)[short],
            )
            exact[short] = 0
        return again, exact


def _times(seconds: FloatArray, factor: FloatArray) -> FloatArray:
    finite = np.isfinite(factor)
    product: FloatArray = np.where(finite, seconds * np.where(finite, factor, 0.0), np.inf)
    return product


def _counts(times: FloatArray, micro_batches: int) -> IntArray:
    """Return how many micro-batches `routes` gives to each replica, int64 [replicas, stages]."""
    # All that end before the time of a perfectly even distribution are among the first M to end;
    # what is left is given away one by one.
    even = micro_batches / (1 / times).sum(axis=0) * (1 - 1e-12)
    counts = np.floor(even / times).astype(np.int64)
    columns = np.arange(times.shape[1])
    while len(columns):
        left = counts[:, columns].sum(axis=0) < micro_batches
        columns = columns[left]
        replica = ((counts[:, columns] + 1) * times[:, columns]).argmin(axis=0)
        counts[replica, columns] += 1
    return counts
