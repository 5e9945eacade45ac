"""Shares that were used before, which cost nothing, and what a new one costs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from keras_het.planning.shares import IntArray

# Steps within which the gain of new shares must exceed what they cost, at least.
STEPS_TO_PAY = 100
_MOST_KEPT = 64


class UsedShares:
    """Memory of the shares that replicas have had, since each new one is compiled or tuned.

    A plan counts as its seconds a step, plus the cost of a new share spread over the next 100
    steps, or over as many as were measured since shares or speeds changed: what has lasted will
    last. Replicas compile at the same time, so a plan costs as much as one of them.
    """

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
        """Return the best plan of the optimum, which may be new, and what was used before.

        Args:
            optimum: the shares with the shortest step, int [n].
            seconds: predicts the time of a step with some shares.
            is_allowed: whether shares that were used before still may be.
        """
        if self._cost(optimum) == 0:
            return optimum
        used = [np.array(shares, np.int64) for shares in self._together]
        candidates, steps = [optimum, *filter(is_allowed, used)], max(self._num_steps, STEPS_TO_PAY)
        return min(candidates, key=lambda each: seconds(each) + self._cost(each) / steps)

    def _cost(self, shares: IntArray) -> float:
        is_known = self._of_replicas.issuperset(enumerate(shares.tolist()))
        return 0.0 if is_known else self.new_share_seconds
