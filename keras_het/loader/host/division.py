"""How the jobs of a host divide its CPUs and reading threads: all compute the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from keras_het.planning.loader import JobModel, ReadingNeed, allocate_loaders, allocate_readers

_FEWEST_CPUS = 0.1
_MOST_READERS = 1024
"""More threads than a job has; they are assigned one by one, while its training waits."""


@dataclasses.dataclass(frozen=True)
class Quota:
    """CPUs that all processes of a cgroup may use together."""

    group: str
    cpus: float


@dataclasses.dataclass(frozen=True)
class Entry:
    """Information that a job shares with the others."""

    job: JobModel
    cpus: float
    cpu_set: frozenset[int]
    quota: Quota | None = None
    reading: ReadingNeed | None = None
    max_reader_threads: int | None = None


def part_of(name: str, entries: Mapping[str, Entry]) -> tuple[float, list[str]]:
    """Return a job's part of the CPUs for which it competes, and the jobs that do.

    Jobs compete if their sets of CPUs overlap, or each overlaps that of a third. Nobody gets more
    than it may use, alone and with the others of its cgroup.
    """
    names = sorted(_competitors(name, entries))
    if len(names) == 1:
        return entries[name].cpus, names
    rivals = {each: entries[each] for each in names}
    cpus = frozenset().union(*(entry.cpu_set for entry in rivals.values()))
    return _divided(rivals, float(len(cpus)), _most_of(rivals))[name], names


def _most_of(jobs: Mapping[str, Entry]) -> dict[str, float]:
    """Return what each job may use: within a cgroup its part of the quota."""
    most = {name: entry.cpus for name, entry in jobs.items()}
    for group in {entry.quota.group for entry in jobs.values() if entry.quota is not None}:
        inside = {name: e for name, e in jobs.items() if e.quota and e.quota.group == group}
        # they differ if it was changed meanwhile
        cpus = max(entry.quota.cpus for entry in inside.values() if entry.quota)
        parts = _divided(inside, cpus, most)
        scale = min(1.0, cpus / sum(parts.values()))
        most |= {name: scale * part for name, part in parts.items()}
    return most


def _divided(jobs: Mapping[str, Entry], cpus: float, most: Mapping[str, float]) -> dict[str, float]:
    """Divide CPUs by marginal gain; what a job may not use goes to the others."""
    given = allocate_loaders([entry.job for entry in jobs.values()], cpus)
    used = [count * e.job.cpus_per_loader for count, e in zip(given, jobs.values(), strict=True)]
    # CPUs from which no job gains are divided evenly
    spare = max(cpus - sum(used), 0.0) / len(used)
    parts = {n: max(part + spare, _FEWEST_CPUS) for n, part in zip(jobs, used, strict=True)}
    bounded = {n: most[n] for n, part in parts.items() if part > most[n] * (1 + 1e-9)}
    others = {name: entry for name, entry in jobs.items() if name not in bounded}
    if not (bounded and others):
        return parts | bounded
    left = max(cpus - sum(bounded.values()), _FEWEST_CPUS)
    return bounded | _divided(others, left, most)


def readers_of(name: str, entries: Mapping[str, Entry], now: float) -> int | None:
    """Return a job's part of the host's reading threads, None if nothing bounds them."""
    given = [
        entry.max_reader_threads
        for entry in entries.values()
        if entry.max_reader_threads is not None
    ]
    needs = {
        each: entry.reading.threads
        for each, entry in sorted(entries.items())
        if entry.reading is not None and now <= entry.reading.until
    }
    if not given or name not in needs:
        return None
    parts = allocate_readers(list(needs.values()), min(*given, _MOST_READERS * len(needs)))
    return dict(zip(needs, parts, strict=True))[name]


def _competitors(name: str, entries: Mapping[str, Entry]) -> set[str]:
    found, cpus = {name}, set(entries[name].cpu_set)
    while True:
        more = {other for other, entry in entries.items() if entry.cpu_set & cpus} - found
        if not more:
            return found
        found |= more
        cpus.update(*(entries[other].cpu_set for other in more))
