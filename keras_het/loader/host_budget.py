"""Divides a host's CPUs and reading threads among the loaders of all jobs that run on it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
import time
import uuid
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from keras_het.loader.host_cpus import own_cpus, own_quotas, usable_cpus
from keras_het.loader.host_jobs import Entry, entry_of, part_of
from keras_het.loader.host_reading import divide_reading
from keras_het.planning.loader import JobModel, Reading

try:
    import fcntl
except ImportError:  # no such lock on this operating system: every job is alone
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger("keras_het")

LONGEST_SILENCE_SECONDS = 600.0
_LONGEST_WAIT_SECONDS = 0.1
_SECONDS_BETWEEN_TRIALS = 0.005


class HostBudget:
    """This job's entry in a small file that all jobs of a user on a host share.

    Each job writes its model and the CPUs that it may run on and reads those of the others, under a
    lock. All that compete for the same CPUs compute the same division by marginal gain. What jobs
    whose loaders wait for I/O may have at once is learned by all of them, in a file beside it. The
    entry of a process that is gone, or silent for ten minutes, counts no longer, nor one that
    another version wrote in a way that cannot be read.

    Args:
        cpus: CPUs that this process may use, quotas included; by default what it may use now.
        path: the file; by default one for each user in the folder for temporary files.
        cpu_set: ids of the CPUs that this process may run on; by default those it may use now.
        io_budget: reading threads of all jobs of the host together, None to learn what is of use.
            If several jobs have one, the smallest counts.
        quotas: CPUs that the cgroups of this process may use at once, by group. By default what
            they may use now; not known if `cpus` is given.

    Attributes:
        jobs: jobs that competed for the same CPUs at the last `update`, this one included.
        reading_loaders: most loaders that this job may have if they wait for I/O, as of the last
            `update`; None if there is no such bound.
        division: number of the division of reading threads that this is part of.
        processes: ids of the other processes that competed for the same CPUs then.

    Raises:
        PermissionError: if the default folder belongs to somebody else.
    """

    def __init__(
        self,
        cpus: float | None = None,
        path: Path | None = None,
        cpu_set: Collection[int] | None = None,
        io_budget: int | None = None,
        quotas: Mapping[str, float] | None = None,
    ) -> None:
        self._quotas = own_quotas() if quotas is None and cpus is None else quotas
        self._cpus = usable_cpus() if cpus is None else cpus
        self._cpu_set = frozenset(own_cpus() if cpu_set is None else cpu_set)
        self._path = path or _own_folder() / "loaders.json"
        self._name = uuid.uuid4().hex
        self._part = self._cpus
        self._io_budget = io_budget
        self.jobs = 1
        self.reading_loaders: int | None = None
        self.division = 0
        self.processes: frozenset[int] = frozenset()

    @property
    def cpus(self) -> float:
        """CPUs that this process may use if nobody else does."""
        return self._cpus

    def update(self, job: JobModel, reading: Reading | None = None) -> float:
        """Writes the model of this job and returns its part of the CPUs.

        Args:
            job: the model as of now.
            reading: the latest window if the loaders mostly wait for I/O, None if they do not.

        Returns:
            CPUs that the loaders of this job may use; all of its own if nobody else may run on
            them, and as many as the last time if another process keeps the file locked.

        Raises:
            OSError: if the file cannot be written.
        """
        if fcntl is None:
            self.reading_loaders = self._io_budget if reading is not None else None
            return self._cpus
        own = Entry(job, self._cpus, self._cpu_set, reading, self._io_budget, self._quotas)
        try:
            jobs, processes = self._exchange(own)
        except BlockingIOError:
            logger.debug("%s is locked; this job keeps %.1f CPUs.", self._path, self._part)
            return self._part
        self._part, competitors = part_of(self._name, jobs)
        self.jobs = len(competitors)
        self.processes = frozenset(processes[name] for name in competitors) - {os.getpid()}
        return self._part

    def leave(self) -> None:
        """Gives this job's part back to the others."""
        if fcntl is None:
            return
        with contextlib.suppress(OSError), self._locked():
            entries = self._read()
            entries.pop(self._name, None)
            self._write(entries)

    def _exchange(self, own: Entry) -> tuple[dict[str, Entry], dict[str, int]]:
        with self._locked():
            entries = self._read()
            process = {**_identity(os.getpid()), "written": time.time()}
            entries[self._name] = {**process, **own.to_dict()}
            self._write(entries)
            # unreadable ones stay in the file: those who wrote them can read them
            found = {name: entry_of(values) for name, values in entries.items()}
            jobs = {name: entry for name, entry in found.items() if entry is not None}
            reading = self._path.with_suffix(".reading")
            ceiling = divide_reading(reading, self._name, jobs, time.time())
        self.reading_loaders = ceiling.parts.get(self._name)
        self.division = ceiling.number
        return jobs, {name: int(entries[name]["pid"]) for name in jobs}

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.with_suffix(".lock").open("a") as lock:
            _lock(lock.fileno())
            try:
                yield  # the end of a process unlocks the file
            finally:
                # closing it does not: a process that was forked meanwhile holds it open too
                fcntl.flock(lock.fileno(), fcntl.LOCK_UN)

    def _read(self) -> dict[str, Any]:
        try:
            entries = json.loads(self._path.read_text())
            return {name: entry for name, entry in entries.items() if _is_alive(entry)}
        except (OSError, ValueError, AttributeError):
            return {}  # none yet, or not ours: begin anew

    def _write(self, entries: dict[str, Any]) -> None:
        # a process that is killed here leaves the old file or the new one
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(entries))
        new.replace(self._path)


def _lock(file: int) -> None:
    """Locks a file; the training step waits, so that a process that is stopped must not stop it.

    Raises:
        BlockingIOError: if another process still has the lock after a while.
    """
    end = time.monotonic() + _LONGEST_WAIT_SECONDS
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                raise
            time.sleep(_SECONDS_BETWEEN_TRIALS)


def _own_folder() -> Path:
    user = os.getuid() if hasattr(os, "getuid") else "user"
    folder = Path(tempfile.gettempdir()) / f"keras_het-{user}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if hasattr(os, "getuid") and folder.stat().st_uid != os.getuid():
        raise PermissionError(
            f"{folder} belongs to another user. Remove it, or set TMPDIR to another folder."
        )
    return folder


def _identity(pid: int) -> dict[str, Any]:
    try:
        return {"pid": pid, "started": psutil.Process(pid).create_time()}
    except (psutil.Error, RuntimeError, ValueError) as error:
        # as in a container whose /proc lacks the time of the start
        raise OSError(f"the system does not tell when process {pid} started ({error})") from error


def _is_alive(entry: Any) -> bool:
    """Whether the process of an entry still trains, and is not another one with the same number."""
    try:
        if time.time() - float(entry["written"]) > LONGEST_SILENCE_SECONDS:
            return False  # its training ended in an error, and the process lives on
        process = psutil.Process(int(entry["pid"]))
        same = abs(process.create_time() - float(entry["started"])) < 1.0
        return same and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, RuntimeError):  # as in `_identity`
        return False
    except (KeyError, TypeError, ValueError) as error:
        logger.debug("An entry of another job tells no process (%r): %r", error, entry)
        return False
