"""A training's requests for its part of the host, and its signs of life to the other jobs."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable

from keras_het.loader.host.budget import HostBudget
from keras_het.planning.loader import JobModel, ReadingNeed

logger = logging.getLogger("keras_het")

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
