"""BOA: the exact min-max program over fitted time models."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from keras_het.planning.argument_checks import check_number
from keras_het.planning.balance.min_max import (
    Granularity,
    coarse_shares,
    coarsest,
    min_max_multiples,
    min_max_shares,
)
from keras_het.planning.balance.plan_trial import REVERTED, PlanTrial, RetrySchedule, UsedShares
from keras_het.planning.balance.policy import (
    BalancePlan,
    BalancePolicy,
    EvenPolicy,
    SharePolicy,
    StaticPolicy,
)
from keras_het.planning.shares import FloatArray, IntArray
from keras_het.planning.time_model import LinearTimeModel
from keras_het.planning.time_model_fit import TimeModelFit

_FIRST_HOLD = 2
_LONGEST_HOLD = 64
# The lower median of c times is about 1.25 / sqrt(c) times as uncertain as one time.
_MEDIAN_DEVIATION = 1.25
# Steps after which a replica that is used but never measured keeps its share, and for which the
# plan after a change of speed needs less certainty.
_PATIENCE = 8
_LARGEST_THRESHOLD = 0.8


class BoaPolicy(SharePolicy):
    r"""Shares with which all replicas finish at the same time, as far as whole samples allow.

    .. math:: \min_b \max_i t_i(b_i) \quad s.t. \quad \sum_i b_i = B,\; l_i \le b_i \le u_i

    Every replica's time is a line over its share, fitted to compute times during training. The
    first steps use the even split. Two measured steps give speeds; shares in proportion to them,
    which the program yields while fixed costs are unknown, are the second point of each line. From
    then on plans are the exact optimum. On equal replicas the first split is already optimal, so
    nothing is probed.

    A plan is replaced only if the predicted gain exceeds the dead-band, the least gain in seconds
    (smaller gains go unnoticed, and steps that short differ by chance) and the contribution of
    noise: the uncertainty of a median of the times seen with the current shares, times the expected
    largest of n normal deviates plus two. Each further plan waits for twice as many steps
    (hold-off), until a replica is found to have changed its speed. Planning then starts over with
    the times since that change.

    Where it is known what compiling or tuning a new share costs, that must pay within 100 steps, or
    within as many as were measured since shares or speeds changed. If it does not, the best of the
    shares that were used before are taken, or the present ones stay.

    A plan that was in effect for some steps without making them shorter is reverted, and later
    plans must promise more: models can be wrong if times depend on more than shares.

    A device whose fixed cost is too high gets no samples. It is tried again at growing intervals.

    Only the abstract was available. It gives static and dynamic stragglers, the min-max integer
    program and hardware-agnostic performance models; the rest is our own design.

    Args:
        num_replicas: number of replicas, n.
        global_batch_size: samples that shares sum to, B.
        dead_band: smallest predicted gain, as a fraction of a step's compute time.
        window: number of compute times kept for each replica.
        least_gain_seconds: smallest predicted gain in seconds per step.
        lower: smallest share of each replica, int [n]; by default 0.
        upper: largest share of each replica, int [n]; by default no bound.
        micro_batch_sizes: most samples that each replica computes on at a time, int [n]; a time is
            then a `MicroBatchTimeModel` over the share. By default shares are not cut.
        granularity: samples of which shares are multiples, or "auto", see `BatchBalancer`.

    Raises:
        TypeError: if a bound is not whole.
        ValueError: if no shares satisfy the bounds, or another number is out of its range.

    Reference:
        Yang, Kang and Youn, "BOA: batch orchestration algorithm for straggler mitigation of
        distributed DL training in heterogeneous GPU cluster", The Journal of Supercomputing 76,
        2020, pages 47-67.
    """

    name = "min_max"

    def __init__(
        self,
        num_replicas: int,
        global_batch_size: int,
        *,
        dead_band: float = 0.025,
        window: int = 64,
        least_gain_seconds: float = 1e-3,
        lower: ArrayLike | None = None,
        upper: ArrayLike | None = None,
        micro_batch_sizes: ArrayLike | None = None,
        granularity: Granularity = 1,
    ) -> None:
        bounds = {"lower": lower, "upper": upper}
        super().__init__(num_replicas, global_batch_size, **bounds, granularity=granularity)
        check_number("dead_band", dead_band, least=0)
        check_number("least_gain_seconds", least_gain_seconds, least=0)
        check_number("window", window, least=1, whole=True)
        self._dead_band, self._least_gain_seconds = dead_band, least_gain_seconds
        self._fit = TimeModelFit(num_replicas, window, micro_batch_sizes)
        self._retries = RetrySchedule()
        self._trying: int | None = None
        self._changed: list[int] = []
        self._plans_since_change = 0
        self._steps_since_change = _PATIENCE
        self._decided_version = -1
        self._trial = PlanTrial()
        self._used = UsedShares()
        self._step_seconds: float | None = None

    def observe_step_seconds(self, seconds: float) -> None:
        """Record the duration of the next steps, by which plans are then judged."""
        self._step_seconds = seconds

    def observe_new_share_seconds(self, seconds: float) -> None:
        """Record what a new share costs; a plan must gain more within 100 steps."""
        self._used.new_share_seconds = seconds

    @property
    def models(self) -> tuple[LinearTimeModel | None, ...]:
        return self._fit.models()

    def recall(
        self, models: Sequence[LinearTimeModel | None], shares: Sequence[int] | None = None
    ) -> None:
        """Base the first plan on known times; two measured steps of a replica replace its time."""
        for replica, model in enumerate(models):
            if model is not None:
                self._fit.recall(replica, model)
        if self._fit.known.any():
            weights = None if shares is None else np.asarray(shares, np.float64)
            wanted = self._solve() if weights is None else self._proportional(weights)
            self._schedule_retries(-1, wanted, None)
            self._current, self._first_reason = wanted, "known device times"

    def set_micro_batch_size(self, replica: int, samples: int) -> None:
        self._fit.set_micro_batch_size(replica, samples)

    def set_global_batch_size(self, samples: int) -> None:
        """Change the number of samples; earlier steps are not comparable."""
        before = self._total
        super().set_global_batch_size(samples)
        if self._total != before:
            self._trial.batch_changed()

    def record(self, shares: IntArray, seconds: FloatArray, matches: bool) -> None:
        self._steps_since_change += 1
        steps = self._fit.observe(shares, seconds)
        changed = np.flatnonzero(steps)
        if changed.size:
            self._trial.speed_changed(int(steps[changed].min()) - 1)
            self._used.speed_changed()
            self._changed += changed.tolist()
            self._plans_since_change = self._steps_since_change = 0
        if shares.sum() == self._total:
            self._used.observe(shares)
        if matches:
            self._trial.observe(shares, self._whole_step(shares, seconds))

    def _whole_step(self, shares: IntArray, seconds: FloatArray) -> float:
        """Return the duration of the step, or the longest compute time if it is unknown."""
        if self._step_seconds is not None:
            return self._step_seconds
        return float(np.max(seconds, where=(shares > 0) & np.isfinite(seconds), initial=0.0))

    def decide(self, step: int) -> BalancePlan | None:
        waits = self._trying is None and not self._changed
        if waits and (plan := self._revert(step)) is not None:
            return plan
        if self._in_effect < (self._hold if waits else _FIRST_HOLD):
            return None
        if waits and (replica := self._retries.next_due(step)) is not None:
            return self._try_again(step, replica)
        if self._fit.version == self._decided_version:
            return None
        unknown = (self._current > 0) & ~self._fit.known
        if unknown.all() or (unknown.any() and self._in_effect < _PATIENCE):
            return None
        self._decided_version = self._fit.version
        return self._improve(step)

    def _revert(self, step: int) -> BalancePlan | None:
        shares = self._trial.shares_to_return_to()
        if shares is None or shares.sum() != self._total or (shares > self._upper).any():
            return None
        reason = f"{REVERTED}{self._trial.comparison}"
        self._plans_since_change += 1
        return self.adopt(self._plan(step, shares, reason))

    @property
    def _hold(self) -> int:
        doublings = max(self._plans_since_change - 1, 0)
        return min(_FIRST_HOLD << min(doublings, 10), _LONGEST_HOLD)

    def _improve(self, step: int) -> BalancePlan | None:
        tried, self._trying = self._trying, None
        reason, self._changed = self._reason(tried), []
        shares = self._worthwhile_shares()
        if shares is None:
            if tried is not None and self._current[tried]:
                self._retries.kept(tried)
            return None
        self._schedule_retries(step, shares, tried)
        plan = self._plan(step, shares, reason)
        if tried is None:
            self._plans_since_change += 1
            self._trial.begin(self._current, shares, plan.gain or 0.0)
        return self.adopt(plan)

    def _worthwhile_shares(self) -> IntArray | None:
        before = self._longest(self._current)
        worthwhile = before - max(before * self._threshold(), self._least_gain_seconds)
        # No shares with the same sum are faster than the smallest time with one more sample.
        more = self._times(np.minimum(self._current + 1, self._upper))
        growing = self._fit.known & (self._current < self._upper)
        if growing.any() and float(more[growing].min()) > worthwhile:
            return None
        shares = self._used.choose(self._solve(), self._longest, self._may_return_to)
        if (shares == self._current).all() or self._trial.refused(shares):
            return None
        return shares if self._longest(shares) <= worthwhile else None

    def _may_return_to(self, shares: IntArray) -> bool:
        is_within = (self._lower <= shares).all() and (shares <= self._upper).all()
        is_measured = (self._fit.known | (shares == self._current)).all()
        is_free = is_within and is_measured and shares.sum() == self._total
        return bool(is_free and not self._trial.refused(shares))

    def _threshold(self) -> float:
        """Return the predicted gain that is worth a change and exceeds the noise."""
        used = (self._current > 0) & self._fit.known
        count = max(int(self._fit.counts(self._current)[used].min(initial=1 << 30)), 1)
        deviation = _MEDIAN_DEVIATION * self._fit.noise / math.sqrt(count)
        # The present shares are wrong after a change, others most likely better.
        largest_of_n = math.sqrt(2 * math.log(max(len(self._current), 2)))
        is_early = self._plans_since_change == 0 and self._steps_since_change < _PATIENCE
        margin = 1.0 if is_early else 2.0 + largest_of_n
        certain = max(self._dead_band, margin * deviation)
        return min(certain * self._trial.distrust, _LARGEST_THRESHOLD)

    def _longest(self, shares: IntArray) -> float:
        return float(self._times(shares).max())

    def _times(self, shares: IntArray) -> FloatArray:
        """Return predicted times; 0 for replicas that are unknown or unused."""
        return np.where(shares > 0, self._fit.seconds(shares), 0.0)

    def _solve(self, lower: IntArray | None = None, upper: IntArray | None = None) -> IntArray:
        """Return optimal shares; replicas without a model keep their current shares."""
        known, fit = self._fit.known, self._fit
        low = np.where(known, self._lower if lower is None else lower, self._current)
        high = np.where(known, self._upper if upper is None else upper, self._current)
        finest = min_max_shares(fit.seconds, self._total, low, high)

        def solve(size: int) -> IntArray | None:
            return min_max_multiples(fit.seconds, self._total, size, low, high)

        return coarse_shares(self._granularity, finest, solve, self._longest)

    def _within_bounds(self) -> IntArray:
        if not self._fit.known.all():
            return super()._within_bounds()
        return self._solve()

    def _try_again(self, step: int, replica: int) -> BalancePlan | None:
        self._retries.started(replica)
        share, size = max(1, self._total // (16 * len(self._current))), coarsest(self._granularity)
        share = min(-(-share // size) * size, int(self._upper[replica]))
        lower, upper = self._lower.copy(), self._upper.copy()
        if share == 0 or self._current[replica]:
            return None
        lower[replica] = upper[replica] = share
        for other in np.flatnonzero(self._current == 0).tolist():
            if other != replica:
                upper[other] = lower[other]
        if lower.sum() > self._total or upper.sum() < self._total:
            return None
        shares = self._solve(lower, upper)
        self._fit.forget(replica)
        self._trying = replica
        return self.adopt(self._plan(step, shares, f"replica {replica} is tried again"))

    def _schedule_retries(self, step: int, shares: IntArray, tried: int | None) -> None:
        after = max(self._longest(shares), 1e-12)
        alone = self._times(np.ones_like(shares))
        for replica in range(len(shares)):
            if shares[replica]:
                self._retries.kept(replica)
            elif (self._current[replica] or replica == tried) and self._upper[replica]:
                extra = float(alone[replica]) / after - 1.0
                self._retries.dropped(replica, step, extra)

    def _reason(self, tried: int | None) -> str:
        if tried is not None:
            return f"after a try of replica {tried}"
        if self._changed:
            which = " ".join(map(str, sorted(set(self._changed))))
            return f"min-max over fitted times, replica {which} changed its speed"
        known_fixed = self._fit.fixed_seconds > 0.01 * self._times(self._current)
        if not (self._fit.identified | known_fixed).any():
            return "proportional to measured speed"
        return "min-max over fitted times"

    def _plan(self, step: int, shares: IntArray, reason: str) -> BalancePlan:
        times = self._times(shares)
        known = self._fit.known | (shares == 0)
        return BalancePlan(
            step,
            self.name,
            tuple(shares.tolist()),
            reason,
            predicted_seconds=tuple(
                float(time) if sure else None for time, sure in zip(times, known, strict=True)
            ),
            step_seconds=float(times.max()),
            previous_step_seconds=self._longest(self._current),
            step_seconds_if_all_used=self._seconds_if_all_used(shares),
            measured=self._fit.latest(),
            models=self._fit.models(),
        )

    def _seconds_if_all_used(self, shares: IntArray) -> float | None:
        could = (shares == 0) & (self._upper > 0) & self._fit.known
        lower = np.where(could, np.maximum(self._lower, 1), self._lower)
        if not could.any() or lower.sum() > self._total:
            return None
        return self._longest(self._solve(lower))


POLICIES: dict[str, type[SharePolicy]] = {
    policy.name: policy for policy in (BoaPolicy, EvenPolicy, StaticPolicy)
}


def make_policy(
    policy: str | BalancePolicy, num_replicas: int, global_batch_size: int, **options: Any
) -> BalancePolicy:
    """Return the policy with a name, or the given policy itself.

    Args:
        policy: a name, or a `BalancePolicy`, which is returned as is.
        num_replicas: number of replicas.
        global_batch_size: samples that shares sum to.
        **options: further arguments of the policy, such as `lower`, `upper` or `weights`.

    Returns:
        The policy.

    Raises:
        TypeError: if it is neither a name nor a policy, an option is unknown, or a policy object
            comes with options.
        ValueError: if there is no policy of this name, or the policy refuses an argument.
    """
    if isinstance(policy, str):
        if policy not in POLICIES:
            raise ValueError(
                f"There is no balance policy of this name. Received: policy={policy!r}. "
                f"Expected one of {sorted(POLICIES)}, or a keras_het.planning.BalancePolicy."
            )
        parameters = inspect.signature(POLICIES[policy]).parameters.values()
        settings = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
        if unknown := sorted(set(options) - set(settings)):
            raise TypeError(
                f"The policy has no such options. Received: {unknown}. The policy {policy!r} "
                f"has {settings}."
            )
        return POLICIES[policy](num_replicas, global_batch_size, **options)
    if not isinstance(policy, BalancePolicy):
        raise TypeError(
            "policy must be a name or an instance of a subclass of "
            f"keras_het.planning.BalancePolicy. Received: {policy!r}. Names are {sorted(POLICIES)}."
        )
    if options:
        raise TypeError(
            f"A policy object takes no options here. Received: {sorted(options)} besides "
            f"{policy!r}. Pass them to the policy itself."
        )
    return policy
