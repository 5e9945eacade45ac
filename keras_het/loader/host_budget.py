"""This job's part of the CPUs and reading threads of its host."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import stat
import tempfile
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import psutil

from keras_het.planning.loader import JobModel, ReadingNeed, allocate_loaders, allocate_readers
from keras_het.usable_cpus import own_cpus, own_quotas, usable_cpus

_logger = logging.getLogger(__name__)

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
    """Return a job's part of the CPUs for which it competes, and the jobs that do."""
    # Jobs compete if their sets of CPUs overlap, or each overlaps that of a third. Nobody gets more
    # than it may use, alone and with the others of its cgroup.
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


_SECONDS_OF_SILENCE = 60.0
_SECONDS_BETWEEN_UPDATES = 1.0
_NOTHING_YET = JobModel(loader_seconds=1e-6, device_seconds=1e-6)


class HostBudget:
    """This job's file in a folder that all jobs of a user on a host share."""

    # Each job writes its model and its CPUs and reads what the others wrote; all compute the same
    # division. The file of a process that is gone, or silent for ten minutes, does not count, nor
    # does one that another version wrote in an unreadable way.

    def __init__(
        self,
        cpus: float | None = None,
        folder: Path | None = None,
        cpu_set: Collection[int] | None = None,
        max_reader_threads: int | None = None,
        quota: Quota | None = None,
    ) -> None:
        self.cpus = usable_cpus() if cpus is None else cpus
        self._quota = _tightest_quota() if cpus is None else quota
        self._cpu_set = frozenset(own_cpus() if cpu_set is None else cpu_set)
        self._path = (folder or own_folder() / "jobs") / f"{uuid.uuid4().hex}.json"
        self._max_reader_threads = max_reader_threads
        self.jobs = 1
        self.reading_loaders: int | None = None
        self.processes: frozenset[int] = frozenset()

    def update(self, job: JobModel, reading: ReadingNeed | None = None) -> float:
        """Write the model of this job and return its part of the CPUs."""
        own = Entry(job, self.cpus, self._cpu_set, self._quota, reading, self._max_reader_threads)
        write_job(self._path, own)
        found = read_jobs(self._path.parent)
        name = self._path.stem
        entries = {**{other: entry for other, (_, entry) in found.items()}, name: own}
        part, competitors = part_of(name, entries)
        self.reading_loaders = readers_of(name, entries, time.time())
        self.jobs = len(competitors)
        self.processes = frozenset(found[each][0] for each in competitors if each != name)
        self.processes -= {os.getpid()}
        return part

    def leave(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)


def _tightest_quota() -> Quota | None:
    """Return the tightest quota of this process's cgroups; of equal ones, that of most jobs."""
    outermost_first = reversed(own_quotas().items())
    quotas = [Quota(group, cpus) for group, cpus in outermost_first]
    return min(quotas, key=lambda quota: quota.cpus, default=None)


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
            _logger.warning("Jobs on this host do not share it: %s.", error)
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


LONGEST_SILENCE_SECONDS = 600.0
"""After these a job no longer counts."""
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
_warned: set[Path] = set()


def own_folder() -> Path:
    """Return the user's folder among the temporary files, creating it if it is missing."""
    user = os.getuid() if hasattr(os, "getuid") else "user"
    folder = Path(tempfile.gettempdir()) / f"keras_het-{user}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()  # not the target of a link
    is_private = not hasattr(os, "getuid") or (
        found.st_uid == os.getuid() and not found.st_mode & _OTHERS_MAY_WRITE
    )
    if not (stat.S_ISDIR(found.st_mode) and is_private):
        raise PermissionError(
            f"{folder} must be a folder of this user (id {user}) that nobody else may write to. "
            f"Received: {stat.filemode(found.st_mode)} of the user with id {found.st_uid}. Remove "
            "it, or set TMPDIR to another folder."
        )
    return folder


def write_job(path: Path, entry: Entry) -> None:
    """Replace a job's file; a process killed meanwhile leaves the old one or the new."""
    values = {"process": _identity(os.getpid()), **dataclasses.asdict(entry)}
    path.parent.mkdir(exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps({**values, "cpu_set": sorted(entry.cpu_set)}))
    new.replace(path)


def read_jobs(folder: Path) -> dict[str, tuple[int, Entry]]:
    """Return the process and the entry of each job that trains; files of others are removed."""
    jobs = {}
    for path in folder.glob("*.json"):
        try:
            values = _read(path)
            if values is not None:
                jobs[path.stem] = int(values["process"]["pid"]), _entry_of(values)
        except FileNotFoundError:
            pass  # the job has just left
        except Exception as error:  # of another version, or broken
            level = logging.DEBUG if path in _warned else logging.WARNING
            _warned.add(path)
            _logger.log(level, "%s cannot be read and does not count (%r).", path, error)
    return jobs


def _read(path: Path) -> Any:
    """Return what a job has written; None, and no file, if it no longer trains."""
    # its training ended in an error, and the process lives on
    is_silent = abs(time.time() - path.stat().st_mtime) > LONGEST_SILENCE_SECONDS
    if not is_silent:
        values = json.loads(path.read_bytes())
        if _is_alive(values["process"]):
            return values
    path.unlink(missing_ok=True)
    return None


def _identity(pid: int) -> dict[str, Any]:
    try:
        return {"pid": pid, "started": psutil.Process(pid).create_time()}
    except (psutil.Error, RuntimeError, ValueError) as error:
        # for example in a container whose /proc lacks the start time
        raise OSError(f"the system does not tell when process {pid} started ({error})") from error


def _is_alive(identity: Any) -> bool:
    """Tell whether a process still runs, and is not a new one with the same id."""
    try:
        process = psutil.Process(int(identity["pid"]))
        same = abs(process.create_time() - float(identity["started"])) < 1.0
        return same and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, RuntimeError):  # as in `_identity`
        return False


def _entry_of(values: Mapping[str, Any]) -> Entry:
    quota, reading = values["quota"], values["reading"]
    return Entry(
        JobModel(**values["job"]),
        values["cpus"],
        frozenset(values["cpu_set"]),
        quota and Quota(**quota),
        reading and ReadingNeed(**reading),
        values["max_reader_threads"],
    )
