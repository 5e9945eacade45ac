"""When a replica that was not worth using is tried again."""

from __future__ import annotations

import math

# Steps before the first new try, and how much longer after each that failed.
FIRST_WAIT = 64
BACK_OFF = 2
LONGEST_WAIT = 1 << 20
# A try may cost this fraction of the time since the last one.
COST = 0.01
# Steps with a share for the replica: until two are measured and the next plan is in effect.
STEPS_OF_A_TRY = 6


class RetrySchedule:
    """Exponential back-off for replicas that are not used.

    A replica without samples has no compute times, so nothing would tell that it has recovered. It
    gets a small share now and then: after `FIRST_WAIT` steps, twice as late after each try that
    failed, and never so soon that tries cost more than one percent of the time in between.
    """

    def __init__(self) -> None:
        self._due: dict[int, int] = {}
        self._failures: dict[int, int] = {}

    def dropped(self, replica: int, step: int, extra_fraction: float) -> None:
        """Schedules the next try of a replica that gets no samples from now on.

        Args:
            replica: index of the replica.
            step: current step.
            extra_fraction: by how much using it makes a step longer, as a fraction of the step.
        """
        failures = self._failures.get(replica, 0)
        self._failures[replica] = failures + 1
        by_cost = math.ceil(STEPS_OF_A_TRY * max(extra_fraction, 0.0) / COST)
        wait = max(min(FIRST_WAIT * BACK_OFF ** min(failures, 20), LONGEST_WAIT), by_cost)
        self._due[replica] = step + wait

    def kept(self, replica: int) -> None:
        """Forgets a replica that is used again."""
        self._due.pop(replica, None)
        self._failures.pop(replica, None)

    def next_due(self, step: int) -> int | None:
        """Returns the lowest replica whose time has come, None if there is none."""
        return min((replica for replica, due in self._due.items() if due <= step), default=None)

    def started(self, replica: int) -> None:
        """Takes note that a try of the replica begins."""
        self._due.pop(replica, None)
