"""Which global batches are the sync group's, and which an async worker's."""

from __future__ import annotations

import bisect
from collections.abc import Callable


class GroupClaims:
    """Batches of the sync group, known to all members some steps ahead.

    Args:
        pass_number: pass over the data.
    """

    num_parts = 1

    def __init__(self, pass_number: int) -> None:
        self.pass_number = pass_number
        self._firsts: list[int] = []
        self._stops: list[int] = []
        self._is_complete = False

    def add(self, first: int, count: int, asked: int) -> None:
        """Notes batches that were handed out to the group.

        Args:
            first: the first of them.
            count: how many; fewer than `asked` at the end of the epoch.
            asked: how many were asked for.
        """
        if count:
            self._firsts.append(first)
            self._stops.append(first + count)
        self._is_complete |= count < asked

    def is_known(self, batch: int) -> bool:
        """Whether it is known already whose batch this is."""
        return batch < self.known_until or self._is_complete

    def owns(self, batch: int) -> bool:
        """Whether a batch is the group's."""
        place = bisect.bisect_right(self._firsts, batch) - 1
        return place >= 0 and batch < self._stops[place]

    def is_over(self, batch: int) -> bool:
        """Whether this batch and all later ones belong to others."""
        return self._is_complete and batch >= self.known_until

    @property
    def known_until(self) -> int:
        """The batch after those that are known to be the group's."""
        return self._stops[-1] if self._stops else 0


class AsyncClaims:
    """Batches of an async worker, claimed one by one as it gets to them.

    Args:
        pass_number: pass over the data.
        num_parts: steps that a batch is cut into.
        claim: gives the next batch of the epoch, None at its end.
    """

    def __init__(self, pass_number: int, num_parts: int, claim: Callable[[], int | None]) -> None:
        self.pass_number = pass_number
        self.num_parts = num_parts
        self._claim = claim
        self._latest = -1
        self.is_exhausted = False

    def is_known(self, batch: int) -> bool:
        """Whether it is known already whose batch this is."""
        return batch <= self._latest or self.is_exhausted

    def owns(self, batch: int) -> bool:
        """Whether a batch is the worker's own; claims the next one if it does not know."""
        while batch > self._latest and not self.is_exhausted:
            claimed = self._claim()
            if claimed is None:
                self.is_exhausted = True
            else:
                self._latest = claimed
        return batch == self._latest

    def is_over(self, batch: int) -> bool:
        """Whether this batch and all later ones belong to others."""
        return self.is_exhausted and batch > self._latest
