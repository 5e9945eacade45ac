"""Samples that a worker reports to the ledger, so that each counts once."""

from __future__ import annotations

_ROOM_FOR_STRAGGLERS = 1 << 20


class UsedSamples:
    """Numbers reports; one whose answer was lost is repeated as it was before the next.

    The ledger says which number it knows last, from an earlier process of the same worker perhaps,
    whose messages may be on their way still: numbers begin some way above.
    """

    def __init__(self) -> None:
        self._waiting = 0
        self._report: tuple[int, int] | None = None
        self._latest: int | None = None

    def add(self, samples: int) -> None:
        """Notes samples to be reported.

        Args:
            samples: used since the last call.
        """
        self._waiting += samples

    @property
    def is_empty(self) -> bool:
        """Whether all samples were reported and answered."""
        return self._report is None and not self._waiting

    def report(self) -> tuple[int, int]:
        """Number and samples of the next report; zeros if it has none to count."""
        if self._report is None and self._waiting and self._latest is not None:
            self._latest += 1
            self._report = self._latest, self._waiting
            self._waiting = 0
        return self._report or (0, 0)

    def answered(self, latest: int) -> None:
        """Notes that the answer to the latest `report` came.

        Args:
            latest: number of the worker's last report that the ledger knows.
        """
        if self._latest is None:
            self._latest = latest + _ROOM_FOR_STRAGGLERS
        self._report = None
