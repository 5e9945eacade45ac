"""LBB: fine and rapid tuning by the straggler effect."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from keras_het.planning.balance.min_max import min_max_shares_linear
from keras_het.planning.balance.plan import BalancePlan
from keras_het.planning.balance.policy import SharePolicy, check_number
from keras_het.planning.balance.proportional import at_least_one
from keras_het.planning.bounded_shares import FloatArray, IntArray
from keras_het.planning.times.time_model import LinearTimeModel


class LbbPolicy(SharePolicy):
    r"""Policy that moves one sample for a small difference and solves again for a large one.

    With the straggler effect :math:`SE = (\max T - \min T) / \bar T` of the last step: below
    `fine_threshold` nothing happens; below `rapid_threshold` one sample moves from the slowest to
    the fastest replica; above, every model becomes

    .. math:: T_i(b) = \frac{T_i - a_{0,i}}{b_i}\, b + a_{0,i}

    and the min-max program is solved, at most once in `rapid_interval` steps (sample by sample in
    between). Decisions and constants follow the paper. An argument replaces its profiling before
    training, which gives the start-up cost :math:`a_0`; the integer program is solved exactly,
    whereas the authors round a continuous solution.

    Args:
        num_replicas: number of replicas, n.
        global_batch_size: samples that shares sum to.
        fixed_seconds: start-up cost of each replica; by default 0.
        fine_threshold: straggler effect from which samples move.
        rapid_threshold: straggler effect from which the program is solved.
        rapid_interval: smallest number of steps between two solutions.
        lower: smallest share of each replica, int [n]; by default 1.
        upper: largest share of each replica, int [n]; by default no bound.

    Raises:
        TypeError: if a bound is not whole.
        ValueError: if no shares satisfy the bounds or a start-up cost is negative.

    Reference:
        Yao, Zhang, Ji, Liu and Gao, "LBB: load-balanced batching for efficient distributed learning
        on heterogeneous GPU cluster", The Journal of Supercomputing 80, 2024, equation 1 and
        algorithms 1 and 2.
    """

    name = "lbb"

    def __init__(
        self,
        num_replicas: int,
        global_batch_size: int,
        *,
        fixed_seconds: Sequence[float] | float = 0.0,
        fine_threshold: float = 0.05,
        rapid_threshold: float = 0.3,
        rapid_interval: int = 30,
        lower: ArrayLike | None = None,
        upper: ArrayLike | None = None,
    ) -> None:
        super().__init__(num_replicas, global_batch_size, lower=lower, upper=upper)
        self._lower = at_least_one(self._lower, self._upper, self._total)
        self._current = self._proportional(self._first_weights())
        self._fixed = np.broadcast_to(np.asarray(fixed_seconds, np.float64), (num_replicas,))
        if not (np.isfinite(self._fixed) & (self._fixed >= 0)).all():
            raise ValueError(
                f"fixed_seconds must be finite and at least 0. Received: {fixed_seconds}."
            )
        self._fine_threshold = check_number("fine_threshold", fine_threshold, 0)
        self._rapid_threshold = check_number("rapid_threshold", rapid_threshold, fine_threshold)
        check_number("rapid_interval", rapid_interval, 1, is_whole=True)
        self._rapid_interval = rapid_interval
        self._rapid_after: int | None = None
        self._times = np.full(num_replicas, np.nan)

    def _record(self, shares: IntArray, seconds: FloatArray, matches: bool) -> None:
        valid = matches & (seconds > 0) & (seconds < np.inf)
        self._times = np.where(valid, seconds, np.nan)

    def _decide(self, step: int) -> BalancePlan | None:
        used = self._current > 0
        times = self._times[used]
        if np.isnan(times).any():
            return None
        effect = float((times.max() - times.min()) / times.mean())
        if effect < self._fine_threshold:
            return None
        if effect < self._rapid_threshold or (
            self._rapid_after is not None and step < self._rapid_after
        ):
            return self._fine(step, effect)
        self._rapid_after = step + self._rapid_interval
        return self._rapid(step, effect)

    def _fine(self, step: int, effect: float) -> BalancePlan | None:
        giver = np.where(self._current > self._lower, np.nan_to_num(self._times), -1.0).argmax()
        free = (self._current < self._upper) & (self._current > 0)
        taker = np.where(free, self._times, np.inf).argmin()
        if giver == taker or self._times[taker] >= self._times[giver]:
            return None
        shares = self._current.copy()
        shares[giver] -= 1
        shares[taker] += 1
        reason = f"straggler effect {effect:.2f}: one sample from replica {giver} to {taker}"
        return self._adopt(BalancePlan(step, self.name, tuple(shares.tolist()), reason))

    def _rapid(self, step: int, effect: float) -> BalancePlan | None:
        used = self._current > 0
        times = np.where(used, self._times, 0.0)
        fixed = np.where(used, np.minimum(self._fixed, times), self._fixed)
        slope = np.maximum(times - fixed, 0.0) / np.maximum(self._current, 1)
        # A replica without samples has no time to solve for: it stays without samples.
        upper = np.where(used, self._upper, 0)
        shares = min_max_shares_linear(fixed, slope, self._total, self._lower, upper)
        if (shares == self._current).all():
            return None
        predicted = np.where(shares > 0, fixed + slope * shares, 0.0)
        return self._adopt(
            BalancePlan(
                step,
                self.name,
                tuple(shares.tolist()),
                f"straggler effect {effect:.2f}: min-max over the last times",
                predicted_seconds=tuple(predicted.tolist()),
                step_seconds=float(predicted.max()),
                previous_step_seconds=float(times.max()),
                models=tuple(map(LinearTimeModel, fixed.tolist(), slope.tolist())),
            )
        )
