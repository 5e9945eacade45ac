"""Samples that a worker reports to the ledger, each counted once."""

from __future__ import annotations

_ROOM_FOR_STRAGGLERS = 1 << 20


class UsedSamples:
    """Numbered reports; one whose answer was lost is repeated unchanged before the next.

    The ledger returns the last number it knows, possibly from an earlier process of the same
    worker, whose messages may still be in flight: numbers therefore begin some way above it.
    """

    def __init__(self) -> None:
        self._waiting = 0
        self._report: tuple[int, int] | None = None
        self._latest: int | None = None

    def add(self, samples: int) -> None:
        """Record samples to be reported."""
        self._waiting += samples

    @property
    def is_empty(self) -> bool:
        """Whether all samples have been reported and answered."""
        return self._report is None and not self._waiting

    def report(self) -> tuple[int, int]:
        """Return number and samples of the next report; zeros if there is nothing to count."""
        if self._report is None and self._waiting and self._latest is not None:
            self._latest += 1
            self._report = self._latest, self._waiting
            self._waiting = 0
        return self._report or (0, 0)

    def answered(self, latest: int) -> None:
        """Record that the answer to the latest `report` has arrived."""
        if self._latest is None:
            self._latest = latest + _ROOM_FOR_STRAGGLERS
        self._report = None
