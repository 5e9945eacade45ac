"""Assignment of global batches to the sync group and the async workers."""

from __future__ import annotations

import bisect
import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

_DIGIT = 1 << 20


@dataclasses.dataclass(frozen=True)
class Grant:
    """Global batches of an epoch handed out to a participant."""

    first: int
    count: int
    is_last: bool

    def to_numbers(self) -> tuple[int, ...]:
        """Encode the grant as float32 numbers for a collective; each below 2**24."""
        return *divmod(self.first, _DIGIT), self.count, int(self.is_last)

    @classmethod
    def from_numbers(cls, numbers: Sequence[float]) -> Grant:
        digit, rest, count, is_last = (int(number) for number in numbers)
        return cls(digit * _DIGIT + rest, count, bool(is_last))


class GroupClaims:
    """Batches of the sync group, known to all members some steps ahead."""

    num_parts = 1

    def __init__(self, passes_before: tuple[bool, ...]) -> None:
        self.passes_before = passes_before
        self.left_over: collections.deque[Any] = collections.deque()
        self._firsts: list[int] = []
        self._stops: list[int] = []
        self.is_exhausted = False

    def add(self, grant: Grant) -> None:
        if grant.count:
            self._firsts.append(grant.first)
            self._stops.append(grant.first + grant.count)
        self.is_exhausted |= grant.is_last

    def is_known(self, batch: int) -> bool:
        return batch < self.known_until or self.is_exhausted

    def owns(self, batch: int) -> bool:
        place = bisect.bisect_right(self._firsts, batch) - 1
        return place >= 0 and batch < self._stops[place]

    def is_over(self, batch: int) -> bool:
        return self.is_exhausted and batch >= self.known_until

    @property
    def known_until(self) -> int:
        """The batch after the last one known to belong to the group."""
        return self._stops[-1] if self._stops else 0


class AsyncClaims(GroupClaims):
    """Batches of an async worker, claimed one at a time when needed."""

    def __init__(
        self,
        passes_before: tuple[bool, ...],
        num_parts: int,
        claim: Callable[[], int | None],
        num_batches: int | None = None,
        left_over: collections.deque[Any] | None = None,
    ) -> None:
        super().__init__(passes_before)
        self.num_parts, self._claim, self._num_batches = num_parts, claim, num_batches
        if left_over is not None:
            self.left_over = left_over

    def owns(self, batch: int) -> bool:
        """Whether a batch belongs to the worker; claims the next one if that is unknown."""
        while not self.is_known(batch):
            claimed = self._claim()
            if claimed is None:
                self.is_exhausted = True
            else:  # Keras may end its epoch with the last batch and not ask for another
                self.add(Grant(claimed, 1, claimed + 1 == self._num_batches))
        return super().owns(batch)
