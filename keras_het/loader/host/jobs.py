"""Division of the CPUs that jobs of a host compete for, and of its reading threads."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from keras_het.loader.host.files import ignore
from keras_het.planning.loader import JobModel, ReadingNeed, allocate_loaders, allocate_readers

_FEWEST_CPUS = 0.1


@dataclasses.dataclass(frozen=True)
class Bound:
    """CPUs that some jobs may use together."""

    names: frozenset[str]
    cpus: float

    def is_exceeded_by(self, parts: Mapping[str, float]) -> bool:
        """Tell whether these parts are too much; insensitive to the order of summation."""
        return sum(parts[name] for name in self.names) > self.cpus * (1 + 1e-9)

    def among(self, names: Collection[str]) -> list[Bound]:
        """Return the bound for the named ones of its jobs, if any."""
        common = self.names.intersection(names)
        return [Bound(common, self.cpus)] if common else []

    def after(self, given: Mapping[str, float]) -> list[Bound]:
        """Return the bound for the rest of its jobs, if any, once some have their parts."""
        rest = self.names.difference(given)
        used = sum(part for name, part in given.items() if name in self.names)
        left = min(self.cpus, max(self.cpus - used, _FEWEST_CPUS))
        return [Bound(rest, left)] if rest else []


def divided(
    jobs: Mapping[str, JobModel], total: float, bounds: Sequence[Bound]
) -> dict[str, float]:
    """Divide CPUs by marginal gain; what bounded jobs may not use goes to the others."""
    parts = _without_bounds(jobs, total)
    over = [bound for bound in bounds if bound.is_exceeded_by(parts)]
    if not over:
        return parts
    # the bound with the most jobs first: bounds within it are divided inside it
    outer = max(over, key=lambda bound: len(bound.names))
    others = [bound for bound in bounds if bound is not outer]
    inside = divided(
        {name: job for name, job in jobs.items() if name in outer.names},
        outer.cpus,
        [part for bound in others for part in bound.among(outer.names)],
    )
    # one loader each may exceed it
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


_LARGEST = 1e15
"""More than any count, or time in seconds since 1970."""
_MOST_READERS = 1024
"""More threads than a job has; they are assigned one by one, while its training waits."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """Information that a job shares with the others."""

    job: JobModel
    cpus: float
    cpu_set: frozenset[int]
    reading: ReadingNeed | None = None
    io_budget: int | None = None
    quotas: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (self.cpus > 0 and self.cpu_set):
            raise ValueError(f"A job must have CPUs. Received: {self.cpus} of {self.cpu_set}.")

    def to_dict(self) -> dict[str, Any]:
        """The entry as plain Python values, for JSON."""
        return {
            "job": dataclasses.asdict(self.job),
            "cpus": self.cpus,
            "cpu_set": sorted(self.cpu_set),
            "reading": None if self.reading is None else dataclasses.asdict(self.reading),
            "io_budget": self.io_budget,
            "quotas": dict(self.quotas),
        }


def entry_of(values: Any, path: Path) -> Entry | None:
    """Parse a job's entry; None if another version of this package wrote it differently."""
    try:
        cpu_set = frozenset(int(_number(cpu)) for cpu in values["cpu_set"])
        reading, io_budget = values["reading"], values["io_budget"]
        return Entry(
            JobModel(**_numbers(values["job"])),
            _number(values["cpus"]),
            cpu_set,
            None if reading is None else ReadingNeed(**_numbers(reading)),
            None if io_budget is None else int(_number(io_budget, least=1)),
            _quotas_of(values["quotas"]),
        )
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        ignore(path, error, "an entry of another job")
        return None


def _number(value: Any, least: float = 0.0) -> float:
    number = float(value)
    if not least <= number <= _LARGEST:
        raise ValueError(f"a number from {least:g} to {_LARGEST:g} was expected, received: {value}")
    return number


def _numbers(values: Any) -> dict[str, float]:
    return {name: _number(value) for name, value in values.items()}


def _quotas_of(values: Any) -> dict[str, float]:
    quotas = {str(group): float(quota) for group, quota in values.items()}
    if not all(0.0 < quota < math.inf for quota in quotas.values()):
        raise ValueError(f"quotas above 0 were expected, received: {quotas}")
    return quotas


def part_of(name: str, entries: Mapping[str, Entry]) -> tuple[float, list[str]]:
    """Return a job's part of the CPUs for which it competes.

    Jobs compete if their sets of CPUs overlap, or each overlaps that of a third. All of them divide
    the CPUs of all their sets by marginal gain, those of a cgroup at most its quota; CPUs from
    which no job gains are divided evenly. All compute the same result.
    """
    names = sorted(_competitors(name, entries))
    own = entries[name]
    if len(names) == 1:
        return own.cpus, names
    rivals = {each: entries[each] for each in names}
    cpus = frozenset().union(*(entry.cpu_set for entry in rivals.values()))
    jobs = {each: entry.job for each, entry in rivals.items()}
    return divided(jobs, float(len(cpus)), _bounds(rivals))[name], names


def readers_of(name: str, entries: Mapping[str, Entry], now: float) -> int | None:
    """Return a job's part of the host's reading threads; all compute the same result."""
    given = [entry.io_budget for entry in entries.values() if entry.io_budget is not None]
    needs = {
        each: entry.reading.threads
        for each, entry in sorted(entries.items())
        if entry.reading is not None and now <= entry.reading.until
    }
    if not given or name not in needs:
        return None
    parts = allocate_readers(list(needs.values()), min(*given, _MOST_READERS * len(needs)))
    return dict(zip(needs, parts, strict=True))[name]


def _bounds(jobs: Mapping[str, Entry]) -> list[Bound]:
    """Return each job's bound, and the joint bounds of the cgroups with quotas."""
    bounds = [Bound(frozenset({name}), entry.cpus) for name, entry in jobs.items()]
    for group in sorted({group for entry in jobs.values() for group in entry.quotas}):
        quotas = {name: e.quotas[group] for name, e in jobs.items() if group in e.quotas}
        # they differ if it was changed meanwhile
        bounds.append(Bound(frozenset(quotas), max(quotas.values())))
    return bounds


def _competitors(name: str, entries: Mapping[str, Entry]) -> set[str]:
    found, cpus = {name}, set(entries[name].cpu_set)
    while True:
        more = {other for other, entry in entries.items() if entry.cpu_set & cpus} - found
        if not more:
            return found
        found |= more
        cpus.update(*(entries[other].cpu_set for other in more))
