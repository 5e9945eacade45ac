"""LB-BSP: samples move from the slowest to the fastest replica."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from keras_het.planning.balance.plan import BalancePlan
from keras_het.planning.balance.policy import SharePolicy, check_number
from keras_het.planning.balance.proportional import at_least_one
from keras_het.planning.bounded_shares import FloatArray, IntArray

_LONGEST_WINDOW = 64


class LbBspPolicy(SharePolicy):
    """Policy that moves a few samples from the slowest to the fastest replica after each window.

    The variant of semi-dynamic load balancing for GPU clusters: times are averaged over a window;
    the straggler gives `step_size` samples to the leader, the fastest replica with room. If a move
    reverses the previous one, the step is halved and the window grows.

    Described by the authors: the exchange, the window, halving on oscillation. Reconstructed,
    because the constants were not found: the first step is B / (16 n) samples, the first window is
    8 steps and doubles up to 64.

    Args:
        num_replicas: number of replicas, n.
        global_batch_size: samples that shares sum to, B.
        step_size: initial number of samples per move; by default B / (16 n), at least 1.
        window: initial number of steps to average.
        lower: smallest share of each replica, int [n]; by default 1.
        upper: largest share of each replica, int [n]; by default no bound.

    Raises:
        TypeError: if a bound is not whole.
        ValueError: if no shares satisfy the bounds.

    Reference:
        Chen, Weng, Wang, Li and Li, "Semi-Dynamic Load Balancing: Efficient Distributed Learning in
        Non-Dedicated Environments", SoCC 2020, arXiv:1806.02508.
    """

    name = "lb_bsp"

    def __init__(
        self,
        num_replicas: int,
        global_batch_size: int,
        *,
        step_size: int | None = None,
        window: int = 8,
        lower: ArrayLike | None = None,
        upper: ArrayLike | None = None,
    ) -> None:
        super().__init__(num_replicas, global_batch_size, lower=lower, upper=upper)
        self._lower = at_least_one(self._lower, self._upper, self._total)
        self._current = self._proportional(self._first_weights())
        if step_size is not None:
            check_number("step_size", step_size, 1, is_whole=True)
        check_number("window", window, 1, is_whole=True)
        self._step_size = step_size or max(1, global_batch_size // (16 * num_replicas))
        self._window = window
        self._last_move = (-1, -1)
        self._sums = np.zeros(num_replicas)
        self._counts = np.zeros(num_replicas, np.int64)

    def _record(self, shares: IntArray, seconds: FloatArray, matches: bool) -> None:
        valid = matches & (seconds > 0) & (seconds < np.inf)
        self._sums += np.where(valid, seconds, 0.0)
        self._counts += valid

    def _clear(self) -> None:
        self._sums[:] = 0.0
        self._counts[:] = 0

    def _adopt(self, plan: BalancePlan) -> BalancePlan:
        self._clear()
        return super()._adopt(plan)

    def _decide(self, step: int) -> BalancePlan | None:
        used = self._current > 0
        if self._in_effect < self._window or not self._counts[used].all():
            return None
        mean = self._sums / np.maximum(self._counts, 1)
        leader = np.where(used & (self._current < self._upper), mean, np.inf).argmin()
        straggler = np.where(used & (self._current > self._lower), mean, -np.inf).argmax()
        if leader == straggler or mean[leader] >= mean[straggler]:
            self._in_effect = 0
            self._clear()
            return None
        if (int(straggler), int(leader)) == self._last_move:
            self._step_size = max(1, self._step_size // 2)
            self._window = min(2 * self._window, _LONGEST_WINDOW)
        room = self._upper[leader] - self._current[leader]
        samples = min(self._step_size, room, self._current[straggler] - self._lower[straggler])
        self._last_move = (int(leader), int(straggler))
        shares = self._current.copy()
        shares[leader] += samples
        shares[straggler] -= samples
        reason = f"{samples} samples from replica {straggler} to {leader}"
        return self._adopt(BalancePlan(step, self.name, tuple(shares.tolist()), reason))
