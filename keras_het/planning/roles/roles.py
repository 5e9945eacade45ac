"""Select the sync group, the async workers, and the workers to leave out."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

from keras_het.planning.roles.role_prediction import (
    ClusterSpeeds,
    Mode,
    ModePrediction,
    Role,
    async_age_seconds,
    predict_hybrid,
    predict_sync,
)
from keras_het.planning.times.time_model import check_not_negative

EXHAUSTIVE_WORKERS = 8
"""Largest number of workers for which all sync groups are tried."""
CLEARLY_SLOWER = 0.1
"""An async worker computes slower by this fraction than every member of the sync group, or would
lengthen the group's steps by this fraction through its link."""

HYBRID_MARGIN = 0.02
"""Gain over the best synchronous mode above which workers become asynchronous.

On the benchmarks' four clusters, hybrid's gain in time to target was predicted between 21 %
too low, with hops measured by steps, and 3 % too high, with hops fitted to other steps (medians
of the runs of a cluster; 22 % too low for the worker at an eighth, where it does not pay). It is
small because the simpler mode trains equal workers better.
"""


@dataclasses.dataclass(frozen=True)
class RolePlan:
    """The role of every worker, and the prediction for each mode.

    `str(plan)` explains the choice in one line.

    Args:
        predictions: the best roles of every mode tried, simplest mode first.
        chosen: the prediction whose roles are used.
        margin: gain of leave_out up to which balanced is preferred.
        hybrid_margin: gain of hybrid up to which the other modes are preferred.
    """

    predictions: tuple[ModePrediction, ...]
    chosen: ModePrediction
    margin: float
    hybrid_margin: float

    @property
    def mode(self) -> Mode:
        """The chosen mode."""
        return self.chosen.mode

    @property
    def roles(self) -> tuple[Role, ...]:
        """The role of every worker."""
        return self.chosen.roles

    @property
    def samples_per_second(self) -> dict[str, float]:
        """Predicted samples per second of every mode."""
        return {p.mode: p.samples_per_second for p in self.predictions}

    @property
    def effective_samples_per_second(self) -> dict[str, float]:
        """Predicted samples per second of every mode, discounted for staleness; these decide."""
        return {p.mode: p.effective_samples_per_second for p in self.predictions}

    def __str__(self) -> str:
        names = {"sync": "sync group", "async": "asynchronous", "out": "left out"}
        groups = (
            f"{name} {_ids(i for i, own in enumerate(self.roles) if own == role)}"
            for role, name in names.items()
            if role in self.roles
        )
        predicted = (
            f"{p.mode} {p.effective_samples_per_second:.4g} (computed {p.samples_per_second:.4g})"
            for p in self.predictions
        )
        return (
            f"{self.mode} (workers: {'; '.join(groups)}). Predicted effective samples/s: "
            f"{', '.join(predicted)}; balanced if leave_out gains no more than {self.margin:.0%}, "
            f"hybrid if it gains more than {self.hybrid_margin:.0%}."
        )


def advise_roles(
    cluster: ClusterSpeeds, margin: float = 0.05, hybrid_margin: float = HYBRID_MARGIN
) -> RolePlan:
    """Choose between all workers in the sync group, some left out, and some asynchronous.

    Every mode is predicted with the best sync group: out of all groups for up to 8 workers, out of
    `likely_groups` and their neighbors for more. For hybrid, the others become asynchronous in
    ascending or descending order of the age of their pushes, while that helps. Hybrid is chosen if
    it gains more than its own margin over the better of the other modes, which are predicted more
    accurately; otherwise balanced, if leave_out gains no more than the margin.

    Args:
        cluster: measured speeds.
        margin: gain of leave_out up to which balanced is preferred, at least 0.
        hybrid_margin: gain of hybrid up to which the other modes are preferred, at least 0.

    Returns:
        The plan. A single worker has only the mode balanced; equal workers have no hybrid.

    Raises:
        TypeError: if a margin is not a number.
        ValueError: if a margin is negative or not finite.
    """
    check_not_negative("margin", margin)
    check_not_negative("hybrid_margin", hybrid_margin)
    everyone = range(len(cluster.samples_per_second))
    predictions = [predict_sync(cluster, everyone)]
    if len(everyone) > 1:
        few = len(everyone) <= EXHAUSTIVE_WORKERS
        predictions += search_all(cluster) if few else search_likely(cluster)
    chosen = _chosen(predictions, margin, hybrid_margin)
    return RolePlan(tuple(predictions), chosen, margin, hybrid_margin)


def _chosen(
    predictions: Sequence[ModePrediction], margin: float, hybrid_margin: float
) -> ModePrediction:
    exact = [p for p in predictions if p.mode != "hybrid"]
    best = max(p.effective_samples_per_second for p in exact)
    for hybrid in predictions[len(exact) :]:
        if hybrid.effective_samples_per_second > best * (1 + hybrid_margin):
            return hybrid
    return next(p for p in exact if p.effective_samples_per_second * (1 + margin) >= best)


def search_all(cluster: ClusterSpeeds) -> tuple[ModePrediction, ...]:
    """Find the best sync groups among all, excluding the group of all workers."""
    workers = range(len(cluster.samples_per_second))
    sizes = (itertools.combinations(workers, size) for size in workers[1:])
    groups = [predict_sync(cluster, group) for group in itertools.chain(*sizes)]
    return _best(groups), *_best_hybrids(cluster, groups)


def search_likely(cluster: ClusterSpeeds) -> tuple[ModePrediction, ...]:
    """Find good sync groups among the likely ones, excluding the group of all workers.

    The best likely group of hybrid is improved by adding, removing or replacing one worker, while
    that helps.
    """
    groups = [predict_sync(cluster, group) for group in likely_groups(cluster)]
    hybrids = _best_hybrids(cluster, groups)
    while hybrids:
        neighbours = [predict_sync(cluster, group) for group in _neighbours(hybrids[0])]
        better = _best([*hybrids, *_best_hybrids(cluster, neighbours)])
        if better is hybrids[0]:
            break
        hybrids = [better]
    return _best(groups), *hybrids


def likely_groups(cluster: ClusterSpeeds) -> list[tuple[int, ...]]:
    """List candidates for the best sync group, excluding the group of all workers.

    Of the workers with at least a certain link rate, the first 1, 2, ... by the time of an even
    share, by speed, and by link rate: at most 3 n^2 groups.
    """
    speed, link = cluster.samples_per_second, cluster.link_bytes_per_second
    workers = range(len(speed))
    time = cluster.even_share_seconds
    groups: dict[tuple[int, ...], None] = {}
    for slowest in sorted(set(link), reverse=True):
        reachable = [i for i in workers if link[i] >= slowest]
        for order in (
            sorted(reachable, key=lambda i: (time[i], -link[i])),
            sorted(reachable, key=lambda i: (-speed[i], time[i])),
            sorted(reachable, key=lambda i: (-link[i], time[i])),
        ):
            for size in range(1, min(len(order), len(speed) - 1) + 1):
                groups[tuple(sorted(order[:size]))] = None
    return list(groups)


def _neighbours(prediction: ModePrediction) -> Iterable[set[int]]:
    """Return sync groups with one worker more, one less, or one exchanged."""
    group = {i for i, role in enumerate(prediction.roles) if role == "sync"}
    others = set(range(len(prediction.roles))) - group
    if len(others) > 1:
        yield from (group | {new} for new in others)
    if len(group) > 1:
        yield from (group - {old} for old in group)
    yield from (group - {old} | {new} for old in group for new in others)


def best_hybrid(cluster: ClusterSpeeds, sync: ModePrediction) -> ModePrediction | None:
    """Choose the async workers for a sync group.

    Only workers that are clearly slower than every member, in computation or in their link, may be
    asynchronous: they would hold the group up. Among equals, stale gradients have no benefit.
    """
    order = sorted(_slower(cluster, sync), key=lambda i: async_age_seconds(cluster, sync, i))
    first = [order[: size + 1] for size in range(len(order))]
    # If staleness does harm, the slowest workers do the least.
    last = [order[size:] for size in range(1, len(order))]
    hybrids = [predict_hybrid(cluster, sync, beside) for beside in (*first, *last)]
    return _best(hybrids) if hybrids else None


def _slower(cluster: ClusterSpeeds, sync: ModePrediction) -> list[int]:
    link, time = cluster.link_bytes_per_second, cluster.even_share_seconds
    group = [i for i, role in enumerate(sync.roles) if role == "sync"]
    # A message there and back; rates of fast links differ by chance and cost nothing.
    allowed = CLEARLY_SLOWER * sync.step_seconds / (2 * max(cluster.model_bytes, 1))
    longest_message = 1 / min(link[i] for i in group) + allowed
    longest = max(time[i] for i in group) / (1 - CLEARLY_SLOWER)
    return [
        i
        for i, role in enumerate(sync.roles)
        if role == "out" and (1 / link[i] > longest_message or time[i] > longest)
    ]


def _best_hybrids(cluster: ClusterSpeeds, groups: Iterable[ModePrediction]) -> list[ModePrediction]:
    """Return the best hybrid of all groups, in a list that is empty if there is none."""
    hybrids = [best_hybrid(cluster, group) for group in groups]
    possible = [hybrid for hybrid in hybrids if hybrid is not None]
    return [_best(possible)] if possible else []


def _best(predictions: Iterable[ModePrediction]) -> ModePrediction:
    return max(predictions, key=lambda p: p.effective_samples_per_second)


def _ids(workers: Iterable[int]) -> str:
    return ", ".join(map(str, workers))
