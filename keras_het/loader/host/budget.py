"""A job's part of the CPUs and reading threads that the loaders of all jobs of a host divide."""

from __future__ import annotations

import contextlib
import logging
import os
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import psutil

from keras_het.loader.host.cpus import own_cpus, own_quotas, usable_cpus
from keras_het.loader.host.files import ignore, locked, own_folder, read_json, write_json
from keras_het.loader.host.jobs import Entry, entry_of, part_of, readers_of
from keras_het.planning.loader import JobModel, ReadingNeed

logger = logging.getLogger("keras_het")

LONGEST_SILENCE_SECONDS = 600.0


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
        self._cpus = usable_cpus() if cpus is None else cpus
        self._cpu_set = frozenset(own_cpus() if cpu_set is None else cpu_set)
        self._path = path or own_folder() / "loaders.json"
        self._name = uuid.uuid4().hex
        self._part = self._cpus
        self._io_budget = io_budget
        self.jobs = 1
        self.reading_loaders: int | None = None
        self.processes: frozenset[int] = frozenset()

    @property
    def cpus(self) -> float:
        """CPUs that this process may use if no other process does."""
        return self._cpus

    def update(self, job: JobModel, reading: ReadingNeed | None = None) -> float:
        """Write the model of this job and return its part of the CPUs."""
        own = Entry(job, self._cpus, self._cpu_set, reading, self._io_budget, self._quotas)
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
        """Return this job's part to the others."""
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


_SECONDS_BETWEEN_UPDATES = 1.0
_NOTHING_YET = JobModel(loader_seconds=1e-6, device_seconds=1e-6)
_SECONDS_OF_SILENCE = 60.0
"""Far less than the silence after which a job no longer counts."""


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
        """Maximum number of loaders that may wait for I/O, None if nothing bounds them."""
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
        """Return the part."""
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
