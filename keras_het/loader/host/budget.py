"""This job's part of the CPUs and reading threads of its host."""

from __future__ import annotations

import contextlib
import logging
import os
import time
import uuid
from collections.abc import Callable, Collection
from pathlib import Path

from keras_het.loader.host.division import Entry, Quota, part_of, readers_of
from keras_het.loader.host.job_files import own_folder, read_jobs, write_job
from keras_het.planning.loader import JobModel, ReadingNeed
from keras_het.usable_cpus import own_cpus, own_quotas, usable_cpus

_logger = logging.getLogger(__name__)

_SECONDS_OF_SILENCE = 60.0
_SECONDS_BETWEEN_UPDATES = 1.0
_NOTHING_YET = JobModel(loader_seconds=1e-6, device_seconds=1e-6)


class HostBudget:
    """This job's file in a folder that all jobs of a user on a host share.

    Each job writes its model and its usable CPUs and reads those of the others. All jobs that
    compete for the same CPUs compute the same division by marginal gain, and so do all jobs whose
    loaders wait for I/O, for the reading threads that a user gave them. The file of a process that
    is gone, or silent for ten minutes, no longer counts, nor does one that another version wrote in
    an unreadable way.
    """

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
        self._io_budget = max_reader_threads
        self.jobs = 1
        self.reading_loaders: int | None = None
        self.processes: frozenset[int] = frozenset()

    def update(self, job: JobModel, reading: ReadingNeed | None = None) -> float:
        """Write the model of this job and return its part of the CPUs."""
        own = Entry(job, self.cpus, self._cpu_set, self._quota, reading, self._io_budget)
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
