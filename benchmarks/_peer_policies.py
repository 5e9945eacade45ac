"""Peers of `BatchBalancer`'s policy "min_max": policies as others have published them.

Each is an object that `BatchBalancer` takes as a user's own. What a paper says and what had to be
filled in is in the docstrings; numbers that the papers give are the defaults.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from keras_het.planning import BalancePlan, LinearTimeModel, min_max_shares_linear
from keras_het.planning.balance import SharePolicy


class PeerPolicy(SharePolicy):
    """Base of the peers, in which no share falls to 0: they could not bring it back."""

    def __init__(self, num_replicas: int, global_batch_size: int, **bounds: Any) -> None:
        super().__init__(num_replicas, global_batch_size, **bounds)
        raised = np.where(self._upper > 0, np.maximum(self._lower, 1), self._lower)
        self._lower = raised if raised.sum() <= self._total else self._lower
        self._current = self._proportional(np.ones(num_replicas))


class ProportionalPolicy(PeerPolicy):
    r"""Dynamic batching by a proportional controller.

    .. math:: b_k' = b_k - X_k (t_k - \bar t) = b_k\, \bar t / t_k, \quad X_k = b_k / t_k

    From the paper: the controller, the moving average of times since the last change, the dead-band
    of 0.05 on the largest relative correction, lower and upper bounds. Ours: renormalized shares
    (with the arithmetic mean their sum is not preserved), the number of steps before a correction,
    and the weight of the moving average. Omitted: the paper permanently bounds a replica whose
    throughput fell after its share grew, which a temporary slow-down would trigger too.

    Reference:
        Tyagi and Sharma, "Taming Resource Heterogeneity In Distributed ML Training With Dynamic
        Batching", ACSOS 2020, equations 4 and 5.
    """

    name = "proportional"
    DEAD_BAND, SMOOTHING, MIN_STEPS = 0.05, 0.3, 3

    def __init__(self, num_replicas: int, global_batch_size: int, **bounds: Any) -> None:
        super().__init__(num_replicas, global_batch_size, **bounds)
        self._mean = np.full(num_replicas, np.nan)

    def record(self, shares: Any, seconds: Any, matches: bool) -> None:
        if not matches:
            return
        valid = (seconds > 0) & (seconds < np.inf)
        moved = self._mean + self.SMOOTHING * (seconds - self._mean)
        self._mean = np.where(valid, np.where(np.isnan(self._mean), seconds, moved), self._mean)

    def adopt(self, plan: BalancePlan) -> BalancePlan:
        self._mean[:] = np.nan
        return super().adopt(plan)

    def decide(self, step: int) -> BalancePlan | None:
        used = self._current > 0
        if self._in_effect < self.MIN_STEPS or np.isnan(self._mean[used]).any():
            return None
        speeds = np.where(used, self._current / np.where(used, self._mean, 1.0), 0.0)
        shares = self._proportional(speeds)
        change = np.abs(shares - self._current)[used] / self._current[used]
        if change.max() <= self.DEAD_BAND:
            return None
        mean = self._mean[used].mean()
        reason = f"in proportion to {mean * 1e3:.1f} ms over each replica's time"
        return self.adopt(BalancePlan(step, self.name, tuple(shares.tolist()), reason))


class LbBspPolicy(PeerPolicy):
    """LB-BSP: after each window, a few samples move from the slowest to the fastest replica.

    The variant of semi-dynamic load balancing for GPU clusters: times are averaged over a window;
    the straggler gives some samples to the leader, the fastest replica with room. If a move
    reverses the previous one, the number of samples is halved and the window grows.

    Described by the authors: the exchange, the window, halving on oscillation. Reconstructed,
    because the constants were not found: the first move is of B / (16 n) samples, the first window
    is 8 steps and doubles up to 64.

    Reference:
        Chen, Weng, Wang, Li and Li, "Semi-Dynamic Load Balancing: Efficient Distributed Learning in
        Non-Dedicated Environments", SoCC 2020, arXiv:1806.02508.
    """

    name = "lb_bsp"
    FIRST_WINDOW, LONGEST_WINDOW = 8, 64

    def __init__(self, num_replicas: int, global_batch_size: int, **bounds: Any) -> None:
        super().__init__(num_replicas, global_batch_size, **bounds)
        self._step_size = max(1, global_batch_size // (16 * num_replicas))
        self._window = self.FIRST_WINDOW
        self._last_move = (-1, -1)
        self._sums = np.zeros(num_replicas)
        self._counts = np.zeros(num_replicas, np.int64)

    def record(self, shares: Any, seconds: Any, matches: bool) -> None:
        valid = matches & (seconds > 0) & (seconds < np.inf)
        self._sums += np.where(valid, seconds, 0.0)
        self._counts += valid

    def _clear(self) -> None:
        self._sums[:] = 0.0
        self._counts[:] = 0

    def adopt(self, plan: BalancePlan) -> BalancePlan:
        self._clear()
        return super().adopt(plan)

    def decide(self, step: int) -> BalancePlan | None:
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
            self._window = min(2 * self._window, self.LONGEST_WINDOW)
        room = self._upper[leader] - self._current[leader]
        samples = min(self._step_size, room, self._current[straggler] - self._lower[straggler])
        self._last_move = (int(leader), int(straggler))
        shares = self._current.copy()
        shares[leader] += samples
        shares[straggler] -= samples
        reason = f"{samples} samples from replica {straggler} to {leader}"
        return self.adopt(BalancePlan(step, self.name, tuple(shares.tolist()), reason))


class LbbPolicy(PeerPolicy):
    r"""LBB: fine and rapid tuning by the straggler effect.

    With the straggler effect :math:`SE = (\max T - \min T) / \bar T` of the last step: below 0.05
    nothing happens; below 0.3 one sample moves from the slowest to the fastest replica; above,
    every model becomes

    .. math:: T_i(b) = \frac{T_i - a_{0,i}}{b_i}\, b + a_{0,i}

    and the min-max program is solved, at most once in 30 steps (sample by sample in between).
    Decisions and constants follow the paper. An argument replaces its profiling before training,
    which gives the start-up cost :math:`a_0`; the integer program is solved exactly, whereas the
    authors round a continuous solution.

    Args:
        num_replicas: number of replicas.
        global_batch_size: samples that shares sum to.
        fixed_seconds: start-up cost of each replica.
        **bounds: `lower` and `upper`.

    Reference:
        Yao, Zhang, Ji, Liu and Gao, "LBB: load-balanced batching for efficient distributed learning
        on heterogeneous GPU cluster", The Journal of Supercomputing 80, 2024, equation 1 and
        algorithms 1 and 2.
    """

    name = "lbb"
    FINE_THRESHOLD, RAPID_THRESHOLD, RAPID_INTERVAL = 0.05, 0.3, 30

    def __init__(
        self, num_replicas: int, global_batch_size: int, *, fixed_seconds: Any = 0.0, **bounds: Any
    ) -> None:
        super().__init__(num_replicas, global_batch_size, **bounds)
        self._fixed = np.broadcast_to(np.asarray(fixed_seconds, np.float64), (num_replicas,))
        self._rapid_after: int | None = None
        self._times = np.full(num_replicas, np.nan)

    def record(self, shares: Any, seconds: Any, matches: bool) -> None:
        valid = matches & (seconds > 0) & (seconds < np.inf)
        self._times = np.where(valid, seconds, np.nan)

    def decide(self, step: int) -> BalancePlan | None:
        used = self._current > 0
        times = self._times[used]
        if np.isnan(times).any():
            return None
        effect = float((times.max() - times.min()) / times.mean())
        if effect < self.FINE_THRESHOLD:
            return None
        if effect < self.RAPID_THRESHOLD or (
            self._rapid_after is not None and step < self._rapid_after
        ):
            return self._fine(step, effect)
        self._rapid_after = step + self.RAPID_INTERVAL
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
        return self.adopt(BalancePlan(step, self.name, tuple(shares.tolist()), reason))

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
        return self.adopt(
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


PEERS: dict[str, type[PeerPolicy]] = {
    policy.name: policy for policy in (ProportionalPolicy, LbBspPolicy, LbbPolicy)
}
