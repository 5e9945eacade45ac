r"""How fast each worker takes its local steps, and the shares with which all take equally long.

Worker i has used :math:`n_i` samples in :math:`t_i` seconds since the last exchange. At its speed
:math:`v_i = n_i / t_i` no worker waits for another if its share is in proportion to :math:`v_i`;
the steps then take :math:`\sum_i n_i / \sum_i v_i` in place of :math:`\max_i t_i`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

# Times vary by that much; new shares for less would only move noise.
_DEAD_BAND = 0.05


class Pace:
    """Samples and seconds of this worker's local steps, without its waits for others."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._last_end = 0.0
        self._samples = 0

    def steps_done(self, samples: int) -> None:
        """Count the samples of steps that have just ended."""
        self._last_end = time.perf_counter()
        if self._began is None:
            self._began = self._last_end  # the first step was traced, which takes long
        else:
            self._samples += samples

    def take_samples(self) -> int:
        """Return the samples since this was asked for last."""
        samples, self._samples = self._samples, 0
        return samples

    def take_seconds(self) -> float:
        """Return the seconds in which they were computed, which they are now."""
        now = time.perf_counter()
        if self._began is None:
            return 0.0
        seconds, self._began = now - self._began, now
        return max(seconds, 0.0)

    def leave_out(self, since: float | None = None) -> None:
        """Leave out a wait that ends now, by default what has passed since the last step."""
        if self._began is not None:
            since = self._last_end if since is None else since
            self._began += time.perf_counter() - max(since, self._began)


def balanced_shares(
    samples: Sequence[float], seconds: Sequence[float], shares: Sequence[float]
) -> list[float] | None:
    """Return new shares of the workers, or None if the present ones are as good.

    A share falls by half at most, and one that was too small for a sample grows: a worker that was
    slow for a moment, or is fast again, is found out at a later exchange. All machines get the same
    bits. Workers without a share get none.
    """
    known = [number for number, used in enumerate(samples) if used > 0 and seconds[number] > 0]
    unknown = [number for number, share in enumerate(shares) if share > 0 and not samples[number]]
    if not known or len(known) + len(unknown) < 2:
        return None
    speeds = {number: samples[number] / seconds[number] for number in known}
    speed = math.fsum(speeds.values())
    best = math.fsum(samples[number] for number in known) / speed
    if not unknown and max(seconds[number] for number in known) <= (1 + _DEAD_BAND) * best:
        return None
    moved = math.fsum(shares[number] for number in known)
    found = [2 * share if number in unknown else share for number, share in enumerate(shares)]
    for number in known:
        found[number] = max(moved * speeds[number] / speed, shares[number] / 2)
    return found
