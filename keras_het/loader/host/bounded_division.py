"""Divides CPUs among jobs, of which some may together use only a part of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from keras_het.planning.loader import JobModel, allocate_loaders

_FEWEST_CPUS = 0.1


@dataclasses.dataclass(frozen=True)
class Bound:
    """What some jobs may use together.

    Args:
        names: the jobs, at least one.
        cpus: CPUs that all of them may use, above 0.
    """

    names: frozenset[str]
    cpus: float

    def is_exceeded_by(self, parts: Mapping[str, float]) -> bool:
        """Whether these parts are too much; the order of a sum, other in each process, is not."""
        return sum(parts[name] for name in self.names) > self.cpus * (1 + 1e-9)

    def among(self, names: Collection[str]) -> list[Bound]:
        """The bound for those of its jobs that are named, if any."""
        common = self.names.intersection(names)
        return [Bound(common, self.cpus)] if common else []

    def after(self, given: Mapping[str, float]) -> list[Bound]:
        """The bound for the rest of its jobs, if any, once some have their parts."""
        rest = self.names.difference(given)
        used = sum(part for name, part in given.items() if name in self.names)
        left = min(self.cpus, max(self.cpus - used, _FEWEST_CPUS))
        return [Bound(rest, left)] if rest else []


def divided(
    jobs: Mapping[str, JobModel], total: float, bounds: Sequence[Bound]
) -> dict[str, float]:
    """Divides CPUs by marginal gain; what some jobs may not use is for the others.

    Args:
        jobs: model of each job, by name.
        total: CPUs to divide.
        bounds: what some of them may use together.

    Returns:
        The part of each job, a tenth of a CPU at least if no bound forbids it.
    """
    parts = _without_bounds(jobs, total)
    over = [bound for bound in bounds if bound.is_exceeded_by(parts)]
    if not over:
        return parts
    # the one of most jobs first: those of the others that it holds are divided within it
    outer = max(over, key=lambda bound: len(bound.names))
    others = [bound for bound in bounds if bound is not outer]
    inside = divided(
        {name: job for name, job in jobs.items() if name in outer.names},
        outer.cpus,
        [part for bound in others for part in bound.among(outer.names)],
    )
    # a loader each may be more than it
    scale = min(1.0, outer.cpus / sum(inside.values()))
    inside = {name: scale * part for name, part in inside.items()}
    rest = {name: job for name, job in jobs.items() if name not in outer.names}
    if not rest:
        return inside
    left = max(total - sum(inside.values()), _FEWEST_CPUS)
    later = [part for bound in others for part in bound.after(inside)]
    return {**inside, **divided(rest, left, later)}


def _without_bounds(jobs: Mapping[str, JobModel], total: float) -> dict[str, float]:
    given = allocate_loaders(list(jobs.values()), total)
    parts = [count * job.cpus_per_loader for count, job in zip(given, jobs.values(), strict=True)]
    spare = max(total - sum(parts), 0.0) / len(parts)
    return {name: max(part + spare, _FEWEST_CPUS) for name, part in zip(jobs, parts, strict=True)}
