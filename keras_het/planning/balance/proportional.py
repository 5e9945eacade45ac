"""Dynamic batching by a proportional controller."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from keras_het.planning.balance.plan import BalancePlan
from keras_het.planning.balance.policy import SharePolicy, check_number
from keras_het.planning.bounded_shares import FloatArray, IntArray


class ProportionalPolicy(SharePolicy):
    r"""Policy that corrects every share by its deviation from the mean time.

    .. math:: b_k' = b_k - X_k (t_k - \bar t) = b_k\, \bar t / t_k, \quad X_k = b_k / t_k

    From the paper: the controller, the moving average of times since the last change, the dead-band
    of 0.05 on the largest relative correction, lower and upper bounds. Ours: renormalized shares
    (with the arithmetic mean their sum is not preserved), the number of steps before a correction,
    and the weight of the moving average. Omitted: the paper permanently bounds a replica whose
    throughput fell after its share grew, which a temporary slow-down would trigger too.

    A share never falls to 0, because the controller could not bring it back.

    Args:
        num_replicas: number of replicas, n.
        global_batch_size: samples that shares sum to.
        dead_band: smallest relative change of a share that leads to a new plan.
        smoothing: weight of the newest time in the moving average, above 0, at most 1.
        min_steps: number of steps with the same shares before a change.
        lower: smallest share of each replica, int [n]; by default 1.
        upper: largest share of each replica, int [n]; by default no bound.

    Raises:
        TypeError: if a bound is not whole.
        ValueError: if no shares satisfy the bounds.

    Reference:
        Tyagi and Sharma, "Taming Resource Heterogeneity In Distributed ML Training With Dynamic
        Batching", ACSOS 2020, equations 4 and 5.
    """

    name = "proportional"

    def __init__(
        self,
        num_replicas: int,
        global_batch_size: int,
        *,
        dead_band: float = 0.05,
        smoothing: float = 0.3,
        min_steps: int = 3,
        lower: ArrayLike | None = None,
        upper: ArrayLike | None = None,
    ) -> None:
        super().__init__(num_replicas, global_batch_size, lower=lower, upper=upper)
        self._lower = at_least_one(self._lower, self._upper, self._total)
        self._current = self._proportional(self._first_weights())
        self._dead_band = check_number("dead_band", dead_band, 0)
        self._smoothing = check_number("smoothing", smoothing, 0, 1)
        check_number("min_steps", min_steps, 1, is_whole=True)
        self._min_steps = min_steps
        self._mean = np.full(num_replicas, np.nan)

    def _record(self, shares: IntArray, seconds: FloatArray, matches: bool) -> None:
        if not matches:
            return
        valid = (seconds > 0) & (seconds < np.inf)
        moved = self._mean + self._smoothing * (seconds - self._mean)
        self._mean = np.where(valid, np.where(np.isnan(self._mean), seconds, moved), self._mean)

    def _adopt(self, plan: BalancePlan) -> BalancePlan:
        self._mean[:] = np.nan
        return super()._adopt(plan)

    def _decide(self, step: int) -> BalancePlan | None:
        used = self._current > 0
        if self._in_effect < self._min_steps or np.isnan(self._mean[used]).any():
            return None
        speeds = np.where(used, self._current / np.where(used, self._mean, 1.0), 0.0)
        shares = self._proportional(speeds)
        change = np.abs(shares - self._current)[used] / self._current[used]
        if change.max() <= self._dead_band:
            return None
        mean = self._mean[used].mean()
        reason = f"in proportion to {mean * 1e3:.1f} ms over each replica's time"
        return self._adopt(BalancePlan(step, self.name, tuple(shares.tolist()), reason))


def at_least_one(lower: IntArray, upper: IntArray, total: int) -> IntArray:
    """Raise lower bounds of 0 to 1 if the upper bounds and the number of samples allow it."""
    raised = np.where(upper > 0, np.maximum(lower, 1), lower)
    return raised if raised.sum() <= total else lower
