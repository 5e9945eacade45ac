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

import dataclasses

import numpy as np

from keras_het.planning.bounded_shares import FloatArray, IntArray
from keras_het.planning.pipeline.devices import Devices
from keras_het.planning.pipeline.model_profile import ModelProfile
from keras_het.planning.pipeline.recomputation import (
    cheapest_recomputation,
    needed_savings,
    stage_memory,
)

# No time is zero: layers that take no time would be routed anywhere.
_TINY = 1e-15


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is planned.

    Args:
        profile: costs of the model.
        devices: devices and links.
        micro_batches: micro-batches of a step, M.
        schedule: "1f1b" or "gpipe".
        recompute: "auto", "never" or "always".
        cuts: where stages may begin and end, unit numbers with 0 and L, [Q].
        all_cuts: whether the model has to be cut at each of them.
    """

    profile: ModelProfile
    devices: Devices
    micro_batches: int
    schedule: str
    recompute: str
    cuts: tuple[int, ...]
    all_cuts: bool = False


class GroupCosts:
    """Costs of the stages between any two cuts, as replicas on a group of devices.

    Arrays are [Q, Q]: stage from cut i to cut j; infinite where it is not possible.

    Args:
        problem: what is planned.
        group: the devices.
    """

    def __init__(self, problem: Problem, group: tuple[int, ...]) -> None:
        self._problem, self._group = problem, group
        profile, members = problem.profile, list(group)
        cuts = np.asarray(problem.cuts)
        rows, columns = np.triu_indices(len(cuts), 1)
        if problem.all_cuts:
            rows, columns = np.arange(len(cuts) - 1), np.arange(1, len(cuts))
        self._rows, self._columns = rows, columns
        self._first, self._end = cuts[rows], cuts[columns]
        forward = profile.forward_seconds[:, members]
        seconds = forward + profile.backward_seconds[:, members]
        speeds = 1 / np.maximum(seconds.sum(axis=0), _TINY)
        # What recomputing a unit costs: the mean over the micro-batches of all replicas.
        self.unit_seconds: FloatArray = forward @ (speeds / speeds.sum())
        if problem.recompute == "always":
            seconds = seconds + forward
        times = np.maximum(self._sums(seconds).T, _TINY)
        self._times = times
        self._counts = _counts(times, problem.micro_batches)
        totals = self._counts * times
        latency = totals.sum(axis=0) / problem.micro_batches
        self._possible = (self._counts > 0).all(axis=0)
        self._latency = latency
        self._steady = np.maximum(totals.max(axis=0) - latency, 0.0)
        weights = self._sums(profile.weight_bytes)
        fixed, per_byte = problem.devices.all_reduce_terms(group)
        self.all_reduce = self._table(np.where(weights > 0, fixed + weights * per_byte, 0.0))
        self._state = self._sums(profile.state_bytes)
        self._activations = self._sums(profile.activation_bytes)
        self._limits = problem.devices.memory_bytes[members]
        self._windows: dict[int, int] = {}
        self._variants: list[tuple[FloatArray, FloatArray]] = []
        self._exact: list[FloatArray] = []
        self._flights: list[IntArray] = []

    def variant(self, window: int) -> int:
        """Return the number of the tables for a stage from which on so many devices are used."""
        if window not in self._windows:
            flights = self._in_flight(window)
            for number, known in enumerate(self._flights):
                if (known == flights).all() or np.isinf(self._limits).all():
                    self._windows[window] = number
                    break
            else:
                self._windows[window] = len(self._flights)
                self._flights.append(flights)
                self._add_variant(flights)
        return self._windows[window]

    def tables(self, variant: int) -> tuple[FloatArray, FloatArray]:
        """Return steady and latency, float64 [Q, Q] in seconds; lower bounds until `exact`."""
        return self._variants[variant]

    def exact(self, variant: int, row: int, column: int) -> bool:
        """Make the costs of one stage exact; return whether they were so already."""
        known = self._exact[variant]
        if known[row, column]:
            return True
        known[row, column] = True
        pair = int(np.flatnonzero((self._rows == row) & (self._columns == column))[0])
        first, end = int(self._first[pair]), int(self._end[pair])
        chosen = cheapest_recomputation(
            self._problem.profile,
            first,
            end,
            self._flights[variant][:, pair].tolist(),
            self._limits.tolist(),
            self.unit_seconds,
        )
        again = np.inf if chosen is None else float(self.unit_seconds[list(chosen)].sum())
        steady, latency = self._variants[variant]
        factor = (self._latency[pair] + again) / self._latency[pair]
        changed = not np.isclose(latency[row, column], self._latency[pair] * factor, 1e-12, 0)
        steady[row, column] = self._steady[pair] * factor if np.isfinite(factor) else np.inf
        latency[row, column] = self._latency[pair] * factor
        return not changed

    def _sums(self, values: FloatArray) -> FloatArray:
        """Return the sum over the units of each stage, [stages, ...]."""
        total = np.concatenate([np.zeros((1, *values.shape[1:])), np.cumsum(values, axis=0)])
        difference: FloatArray = total[self._end] - total[self._first]
        return difference

    def _table(self, values: FloatArray) -> FloatArray:
        size = len(self._problem.cuts)
        table = np.full((size, size), np.inf)
        table[self._rows, self._columns] = np.where(self._possible, values, np.inf)
        return table

    def _in_flight(self, window: int) -> IntArray:
        """Return at least the micro-batches in flight, int64 [replicas, stages].

        Micro-batches that a replica finishes one after the other, c of them, span c - 1 times its
        own time; meanwhile replica k finishes at least floor((c - 1) t / t_k) others, and all of
        them are in the window.
        """
        if self._problem.schedule == "gpipe":
            return self._counts
        if window <= len(self._group):
            return np.minimum(self._counts, 1)
        times = self._times
        if (times == times[0]).all():
            return np.minimum(self._counts, -(-window // len(self._group)))
        flights = np.ones(times.shape, np.int64)
        for number in range(2, window + 1):
            others = [
                np.floor((number - 1) * mine / times).sum(axis=0) - (number - 1) for mine in times
            ]
            more = number + np.array(others) <= window
            if not more.any():
                break
            flights[more] = number
        return np.minimum(self._counts, flights)

    def _add_variant(self, flights: IntArray) -> None:
        again = np.zeros(len(self._rows))
        exact = np.ones(len(self._rows), bool)
        limits = self._limits[:, None]
        if self._problem.recompute == "always":
            first = self._problem.profile.cut_bytes[self._first]
            held = self._state + self._activations + flights * first
            again[needed_savings(held, limits, np.ones_like(flights))[0] > 0] = np.inf
        else:
            held = self._state + flights * self._activations
            need, _ = needed_savings(held, limits, flights)
            if self._problem.recompute == "never":
                again[need > 0] = np.inf
            else:
                again[np.isinf(need)] = np.inf
                short = np.flatnonzero((need > 0) & np.isfinite(need) & self._possible)
                exact[short] = False
                again[short] = self._least_recomputation(short, need[short], flights)
        factor = (self._latency + again) / self._latency
        self._variants.append(
            (
                self._table(
                    np.where(np.isinf(again), np.inf, self._steady * np.minimum(factor, 1e30))
                ),
                self._table(self._latency * factor),
            )
        )
        size = len(self._problem.cuts)
        known = np.ones((size, size), bool)
        known[self._rows, self._columns] = exact
        self._exact.append(known)

    def _least_recomputation(
        self, stages: IntArray, need: FloatArray, flights: IntArray
    ) -> FloatArray:
        """Return a lower bound of the time to recompute, float64 [stages]: fractions of units.

        At least one run of units begins somewhere in the stage, where the fewest bytes cross.
        """
        profile = self._problem.profile
        useful = np.flatnonzero(profile.activation_bytes > 0)
        rates = self.unit_seconds[useful] / profile.activation_bytes[useful]
        order = useful[np.argsort(rates, kind="stable")]
        rates = np.sort(rates, kind="stable")
        first, end = self._first[stages], self._end[stages]
        most = flights[:, stages].max(axis=0)
        starts = np.array([profile.cut_bytes[i:j].min() for i, j in zip(first, end, strict=True)])
        need = need + starts * most / np.maximum(most - 1, 1)
        result = np.empty(len(stages))
        for part in np.array_split(np.arange(len(stages)), max(1, len(stages) // 1024)):
            inside = (first[part, None] <= order) & (order < end[part, None])
            freed = np.cumsum(inside * profile.activation_bytes[order], axis=1)
            seconds = np.cumsum(inside * self.unit_seconds[order], axis=1)
            number = (freed < need[part, None]).sum(axis=1)
            enough = number < len(order)
            before = np.minimum(number, len(order) - 1)
            at = np.arange(len(part))
            had = np.where(number > 0, freed[at, before - 1], 0.0)
            cost = np.where(number > 0, seconds[at, before - 1], 0.0)
            cost += (need[part] - had) * rates[before]
            result[part] = np.where(enough, cost, np.inf)
        return result * (1 - 1e-12)

    def recomputed(self, first: int, end: int, in_flight: list[int]) -> tuple[int, ...] | None:
        """Return the units that a stage recomputes, or None if it does not fit."""
        problem = self._problem
        if problem.recompute == "auto":
            limits = self._limits.tolist()
            return cheapest_recomputation(
                problem.profile, first, end, in_flight, limits, self.unit_seconds
            )
        units = tuple(range(first, end)) if problem.recompute == "always" else ()
        held = [stage_memory(problem.profile, first, end, d, units) for d in in_flight]
        return units if (np.array(held) <= self._limits * (1 + 1e-9)).all() else None


class KnownCosts:
    """Costs of groups, computed once for each set of devices.

    Args:
        problem: what is planned.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._known: dict[tuple[int, ...], GroupCosts] = {}

    def __call__(self, group: tuple[int, ...]) -> GroupCosts:
        """Return the costs of stages on a group of devices."""
        if group not in self._known:
            self._known[group] = GroupCosts(self._problem, group)
        return self._known[group]


def _counts(times: FloatArray, micro_batches: int) -> IntArray:
    """Return how many micro-batches `routes` gives to each replica, int64 [replicas, stages].

    All that end before the time of a perfectly even distribution are among the first M to end; what
    is left is given away one by one.
    """
    replicas = len(times)
    if (times == times[0]).all():
        more = np.arange(replicas) < micro_batches % replicas
        return np.repeat((micro_batches // replicas + more)[:, None], times.shape[1], axis=1)
    even = micro_batches / (1 / times).sum(axis=0) * (1 - 1e-12)
    counts = np.floor(even / times).astype(np.int64)
    columns = np.arange(times.shape[1])
    while len(columns):
        left = counts[:, columns].sum(axis=0) < micro_batches
        columns = columns[left]
        replica = ((counts[:, columns] + 1) * times[:, columns]).argmin(axis=0)
        counts[replica, columns] += 1
    return counts
