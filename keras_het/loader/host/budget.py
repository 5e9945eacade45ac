"""A job's part of the CPUs and reading threads that the loaders of all jobs of a host divide."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from keras_het.loader.host.files import ignore, locked, own_folder, read_json, write_json
from keras_het.planning.loader import JobModel, ReadingNeed, allocate_loaders, allocate_readers
from keras_het.usable_cpus import own_cpus, own_quotas, usable_cpus

logger = logging.getLogger("keras_het")

LONGEST_SILENCE_SECONDS = 600.0
"""After these a job no longer counts."""
_SECONDS_OF_SILENCE = 60.0
_SECONDS_BETWEEN_UPDATES = 1.0
_NOTHING_YET = JobModel(loader_seconds=1e-6, device_seconds=1e-6)


class HostBudget:
    """This job's entry in a small file that all jobs of a user on a host share.

    Each job writes its model and its usable CPUs and reads those of the others, under a lock. All
    jobs that compete for the same CPUs compute the same division by marginal gain, and so do all
    jobs whose loaders wait for I/O, for the reading threads that a user gave them. The entry of a
    process that is gone, or silent for ten minutes, no longer counts, nor does one that another
    version wrote in an unreadable way.
    """

    def __init__(
        self,
        cpus: float | None = None,
        path: Path | None = None,
        cpu_set: Collection[int] | None = None,
        io_budget: int | None = None,
        quotas: Mapping[str, float] | None = None,
    ) -> None:
        self._quotas = own_quotas() if quotas is None else quotas
        self.cpus = usable_cpus() if cpus is None else cpus
        self._cpu_set = frozenset(own_cpus() if cpu_set is None else cpu_set)
        self._path = path or own_folder() / "loaders.json"
        self._name = uuid.uuid4().hex
        self._part = self.cpus
        self._io_budget = io_budget
        self.jobs = 1
        self.reading_loaders: int | None = None
        self.processes: frozenset[int] = frozenset()

    def update(self, job: JobModel, reading: ReadingNeed | None = None) -> float:
        """Write the model of this job and return its part of the CPUs."""
        own = Entry(job, self.cpus, self._cpu_set, reading, self._io_budget, self._quotas)
        try:
            jobs, processes = self._exchange(own)
        except BlockingIOError:
            logger.debug("%s is locked; this job keeps %.1f CPUs.", self._path, self._part)
            return self._part
        self._part, competitors = part_of(self._name, jobs)
        self.reading_loaders = readers_of(self._name, jobs, time.time())
        self.jobs = len(competitors)
        self.processes = frozenset(processes[name] for name in competitors) - {os.getpid()}
        return self._part

    def leave(self) -> None:
        with contextlib.suppress(OSError), locked(self._path.with_suffix(".lock")):
            entries = self._read()
            entries.pop(self._name, None)
            write_json(self._path, entries)

    def _exchange(self, own: Entry) -> tuple[dict[str, Entry], dict[str, int]]:
        with locked(self._path.with_suffix(".lock")):
            entries = self._read()
            process = {**_identity(os.getpid()), "written": time.time()}
            entries[self._name] = {**process, **own.to_dict()}
            write_json(self._path, entries)
            # unreadable entries stay in the file: their writers can read them
            found = {name: entry_of(values, self._path) for name, values in entries.items()}
            jobs = {name: entry for name, entry in found.items() if entry is not None}
        return jobs, {name: int(entries[name]["pid"]) for name in jobs}

    def _read(self) -> dict[str, Any]:
        entries = read_json(self._path) or {}
        if not isinstance(entries, dict):
            ignore(self._path, TypeError(f"entries were expected, received: {type(entries)}"))
            return {}
        return {name: own for name, own in entries.items() if _is_alive(own, self._path)}


def _identity(pid: int) -> dict[str, Any]:
    try:
        return {"pid": pid, "started": psutil.Process(pid).create_time()}
    except (psutil.Error, RuntimeError, ValueError) as error:
        # for example in a container whose /proc lacks the start time
        raise OSError(f"the system does not tell when process {pid} started ({error})") from error


def _is_alive(entry: Any, path: Path) -> bool:
    """Tell whether an entry's process still trains, and is not a new one with the same id."""
    try:
        if not abs(time.time() - float(entry["written"])) <= LONGEST_SILENCE_SECONDS:
            return False  # its training ended in an error, and the process lives on
        process = psutil.Process(int(entry["pid"]))
        same = abs(process.create_time() - float(entry["started"])) < 1.0
        return same and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, RuntimeError):  # as in `_identity`
        return False
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        ignore(path, error, "the process of an entry")
        return False


class CpuPart:
    """The part of the host that one training holds."""

    def __init__(
        self, budget: HostBudget | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._budget = budget
        self._clock = clock
        self._job: JobModel | None = None
        self._reading: ReadingNeed | None = None
        self._is_bounded = False
        self._written: float | None = None

    @property
    def reading_loaders(self) -> int | None:
        return None if self._budget is None else self._budget.reading_loaders

    @property
    def processes(self) -> frozenset[int]:
        """Ids of the processes that compete for the same CPUs and divide them."""
        return frozenset() if self._budget is None else self._budget.processes

    def announce(self) -> None:
        """Let the others know of this job, and it of them, before anything is measured."""
        if self._budget is not None and self._job is None:
            with contextlib.suppress(OSError):  # `update` reports it
                self._budget.update(_NOTHING_YET)

    def update(self, job: JobModel, reading: ReadingNeed | None = None) -> float | None:
        """Accept a new model of the job, and write it at most once a second."""
        self._job, self._reading = job, reading
        return self._write(_SECONDS_BETWEEN_UPDATES)

    def heartbeat(self) -> float | None:
        """Show that the job is alive; called in every step, as windows may outlast its silence."""
        return self._write(_SECONDS_OF_SILENCE)

    def leave(self) -> None:
        if self._budget is not None:
            self._budget.leave()

    def _write(self, seconds: float) -> float | None:
        if self._budget is None or self._job is None:
            return None
        now = self._clock()
        if self._written is not None and now - self._written < seconds:
            return None
        self._written = now
        try:
            part = self._budget.update(self._job, self._reading)
        except OSError as error:
            logger.warning("Jobs on this host do not share it: %s.", error)
            return self._end()
        self._is_bounded = True
        return part

    def _end(self) -> float | None:
        """Stop sharing; this job no longer leaves the others their part of this host."""
        budget, self._budget = self._budget, None
        if budget is None or not self._is_bounded:
            return None
        budget.leave()
        return budget.cpus


# --- the division, which all jobs compute alike

_FEWEST_CPUS = 0.1


@dataclasses.dataclass(frozen=True)
class Bound:
    """CPUs that some jobs may use together."""

    names: frozenset[str]
    cpus: float

    def is_exceeded_by(self, parts: Mapping[str, float]) -> bool:
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
        return {**dataclasses.asdict(self), "cpu_set": sorted(self.cpu_set)}


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
