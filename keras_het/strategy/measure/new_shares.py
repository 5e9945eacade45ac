"""First steps of a replica with a new share, in which it is compiled or algorithms are tried."""

from __future__ import annotations

import collections
import statistics

import numpy as np

from keras_het.planning.shares import FloatArray, IntArray

_MOST_KEPT = 32


class NewShares:
    """What measured steps with a new share cost; their times say nothing about speed."""

    def __init__(self) -> None:
        self._num_unsettled = 0
        self._num_seen = collections.Counter[tuple[int, int]]()
        self._first: dict[int, int] = {}
        self._unsettled = collections.defaultdict[tuple[int, int], float](float)
        self._extra = collections.deque[float](maxlen=_MOST_KEPT)

    def begin(self, num_unsettled: int) -> None:
        """Begin a training in which so many measured steps of a new share say nothing."""
        self._num_unsettled = num_unsettled
        self._num_seen.clear()
        self._first.clear()
        self._unsettled.clear()

    @property
    def seconds(self) -> float:
        """Time that a new share takes more than a known one, the median; 0 if unknown."""
        return max(statistics.median(self._extra), 0.0) if self._extra else 0.0

    def leave_out(self, shares: IntArray, seconds: FloatArray) -> None:
        """Make those of a step's times unknown that say nothing, and learn what they cost."""
        for replica, share in enumerate(shares.tolist() if self._num_unsettled else ()):
            new = replica, share
            first = self._first.setdefault(replica, share)
            self._num_seen[new] += 1
            if self._num_seen[new] <= self._num_unsettled:
                self._unsettled[new] += float(seconds[replica])
                seconds[replica] = np.nan
            elif new in self._unsettled:
                settled = self._num_unsettled * float(seconds[replica])
                extra = self._unsettled.pop(new) - settled
                if share and share != first:  # the first one loads kernels and memory, too
                    self._extra.append(extra)
