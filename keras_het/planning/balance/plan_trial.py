"""What a policy remembers of shares: failed plans, unused replicas, and shares that are new."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable

import numpy as np

from keras_het.planning.shares import IntArray

# Steps before the first retry, and the growth of that wait after each failure.
FIRST_WAIT = 64
BACK_OFF = 2
LONGEST_WAIT = 1 << 20
# A retry may cost this fraction of the time since the last one.
COST = 0.01
# Steps in which the replica has a share: until two are measured and the next plan is in effect.
STEPS_OF_A_TRY = 6


class RetrySchedule:
    """Exponential back-off for unused replicas, of which no compute time can show a recovery."""

    def __init__(self) -> None:
        self._due: dict[int, int] = {}
        self._failures: dict[int, int] = {}

    def dropped(self, replica: int, step: int, extra_fraction: float) -> None:
        failures = self._failures.get(replica, 0)
        self._failures[replica] = failures + 1
        by_cost = math.ceil(STEPS_OF_A_TRY * max(extra_fraction, 0.0) / COST)
        wait = max(min(FIRST_WAIT * BACK_OFF ** min(failures, 20), LONGEST_WAIT), by_cost)
        self._due[replica] = step + wait

    def kept(self, replica: int) -> None:
        self._due.pop(replica, None)
        self._failures.pop(replica, None)

    def next_due(self, step: int) -> int | None:
        """Return the lowest replica whose retry is due, None if there is none."""
        return min((replica for replica, due in self._due.items() if due <= step), default=None)

    def started(self, replica: int) -> None:
        self._due.pop(replica, None)


REVERTED = "reverted: "
"""How the reason of a plan begins that returns to earlier shares."""
_STEPS_BEFORE = 16
_STEPS_TO_JUDGE = 8
# Fraction of the predicted gain that must be achieved.
_LEAST_PART_OF_GAIN = 0.25
_MOST_DISTRUST = 16.0
# Steps until shares that have failed may be tried again, which doubles: noise can fail good ones.
_FIRST_REFUSAL = 1024


class PlanTrial:
    """Comparison of the steps after a plan with those before it."""

    def __init__(self) -> None:
        self.distrust = 1.0
        self.comparison = ""
        self._latest: collections.deque[float] = collections.deque(maxlen=_STEPS_BEFORE)
        self._before: float | None = None
        self._previous: IntArray | None = None
        self._shares: IntArray | None = None
        self._gain = 0.0
        self._num_steps = 0
        self._refused_until: dict[tuple[int, ...], int] = {}
        self._failures: dict[tuple[int, ...], int] = {}

    def refused(self, shares: IntArray) -> bool:
        """Whether these shares have failed lately, and no replica has changed its speed since."""
        return tuple(shares.tolist()) in self._refused_until

    def observe(self, shares: IntArray, seconds: float) -> None:
        """Record a step with the shares of the last plan."""
        if self._shares is not None and not np.array_equal(shares, self._shares):
            self._shares = None  # another plan came in between
        if seconds > 0:
            self._latest.append(seconds)
        self._num_steps += 1
        for tried in [t for t, until in self._refused_until.items() if self._num_steps >= until]:
            del self._refused_until[tried]
            self.distrust = max(self.distrust / 2, 1.0)

    def speed_changed(self, steps: int) -> None:
        """Discard all but the latest steps, because a replica became faster or slower before."""
        while len(self._latest) > steps:
            self._latest.popleft()
        self._shares = None
        self.distrust = 1.0
        self._forget_failures()

    def batch_changed(self) -> None:
        """Discard older steps, because steps now have another number of samples."""
        self._latest.clear()
        self._before = self._shares = None
        self._forget_failures()

    def _forget_failures(self) -> None:
        self._refused_until.clear()
        self._failures.clear()

    def begin(self, previous: IntArray, shares: IntArray, gain: float) -> None:
        """Prepare for a plan that is about to come into effect."""
        self._before = float(np.median(self._latest)) if self._latest else None
        self._previous, self._shares, self._gain = previous.copy(), shares.copy(), gain
        self._latest.clear()

    def shares_to_return_to(self) -> IntArray | None:
        """Return the shares before the plan if it broke its promise; judged once."""
        if self._shares is None or self._before is None or len(self._latest) < _STEPS_TO_JUDGE:
            return None
        after, tried, self._shares = float(np.median(self._latest)), self._shares, None
        if after <= self._before * (1 - _LEAST_PART_OF_GAIN * self._gain):
            self.distrust = 1.0
            return None
        self.distrust = min(2 * self.distrust, _MOST_DISTRUST)
        key = tuple(tried.tolist())
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        self._refused_until[key] = self._num_steps + (_FIRST_REFUSAL << min(failures - 1, 20))
        self.comparison = (
            f"{after * 1e3:.3g} ms a step measured, {self._before * 1e3:.3g} ms before"
        )
        self._latest.clear()
        return self._previous


# Steps within which the gain of new shares must exceed what they cost, at least.
STEPS_TO_PAY = 100
_MOST_KEPT = 64


class UsedShares:
    """Memory of the shares that replicas have had, since each new one is compiled or tuned."""

    # A plan counts as its seconds a step, plus the cost of a new share over the next 100 steps, or
    # over as many as were measured since shares or speeds changed: what has lasted will last.

    def __init__(self) -> None:
        self.new_share_seconds = 0.0
        """What a share costs that its replica has not had yet; 0 if that is unknown."""
        self._num_steps = 0
        self._of_replicas: set[tuple[int, int]] = set()
        self._together: dict[tuple[int, ...], None] = {}  # the latest last

    def observe(self, shares: IntArray) -> None:
        """Record what a step has used."""
        used = tuple(shares.tolist())
        self._num_steps += 1
        if next(reversed(self._together), None) == used:
            return
        self._num_steps = 1
        self._of_replicas.update(enumerate(used))
        self._together.pop(used, None)
        self._together[used] = None
        if len(self._together) > _MOST_KEPT:
            del self._together[next(iter(self._together))]

    def speed_changed(self) -> None:
        """Restart the count of steps, because a replica became faster or slower."""
        self._num_steps = 0

    def choose(
        self,
        optimum: IntArray,
        seconds: Callable[[IntArray], float],
        is_allowed: Callable[[IntArray], bool],
    ) -> IntArray:
        """Return the best plan of the optimum, which may be new, and what was used before."""
        if self._cost(optimum) == 0:
            return optimum
        used = [np.array(shares, np.int64) for shares in self._together]
        candidates, steps = [optimum, *filter(is_allowed, used)], max(self._num_steps, STEPS_TO_PAY)
        return min(candidates, key=lambda each: seconds(each) + self._cost(each) / steps)

    def _cost(self, shares: IntArray) -> float:
        is_known = self._of_replicas.issuperset(enumerate(shares.tolist()))
        return 0.0 if is_known else self.new_share_seconds
