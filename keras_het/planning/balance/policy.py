"""Plans of shares, the interface and the base of policies, and the splits that never change."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from keras_het.planning.balance.min_max import (
    Granularity,
    check_granularity,
    coarse_shares,
    proportional_multiples,
)
from keras_het.planning.shares import (
    FloatArray,
    IntArray,
    Weights,
    check_bounds,
    proportional_shares,
    weight_of_each,
)
from keras_het.planning.time_model import LinearTimeModel
from keras_het.planning.time_model_fit import Measurement

_SHARES_ON_ONE_LINE = 16


@dataclasses.dataclass(frozen=True)
class BalancePlan:
    """Each replica's samples of the global batch, and the reason for them.

    Args:
        step: step after which the plan was made.
        policy: name of the policy.
        shares: samples of each replica; they sum to the global batch.
        reason: the reason, in a few words.
        predicted_seconds: predicted compute time of each replica, None if unknown; 0 for an
            unused replica. Empty if the policy does not predict.
        step_seconds: predicted compute time of the slowest replica, without the exchange; None if
            unknown.
        previous_step_seconds: the same for the previous shares, under the same models.
        step_seconds_if_all_used: the same if every usable but unused replica had at least one
            sample; None if there is no such replica.
        measured: latest measurement of each replica. Empty if the policy keeps none.
        models: time model of each replica. Empty if the policy has none.
    """

    step: int
    policy: str
    shares: tuple[int, ...]
    reason: str
    predicted_seconds: tuple[float | None, ...] = ()
    step_seconds: float | None = None
    previous_step_seconds: float | None = None
    step_seconds_if_all_used: float | None = None
    measured: tuple[Measurement | None, ...] = ()
    models: tuple[LinearTimeModel | None, ...] = ()

    @property
    def unused(self) -> tuple[int, ...]:
        """Replicas without samples."""
        return tuple(replica for replica, share in enumerate(self.shares) if not share)

    @property
    def gain(self) -> float | None:
        """Predicted fraction of the step's compute time that is saved; None if unknown."""
        if self.step_seconds is None or not self.previous_step_seconds:
            return None
        return 1.0 - self.step_seconds / self.previous_step_seconds

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain Python values, for JSON."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name in ("measured", "models"):
            values[name] = [item and dataclasses.asdict(item) for item in values[name]]
        for name in ("shares", "predicted_seconds"):
            values[name] = list(values[name])
        return {**values, "unused": list(self.unused), "gain": self.gain}

    def __str__(self) -> str:
        shown = " ".join(map(str, self.shares[:_SHARES_ON_ONE_LINE]))
        if len(self.shares) > _SHARES_ON_ONE_LINE:
            shown += f" ... ({len(self.shares)} replicas)"
        begin = f"step {self.step}: shares" if self.step >= 0 else "initial shares"
        text = f"{begin} {shown} ({self.policy}: {self.reason}"
        if self.step_seconds is not None and self.previous_step_seconds is not None:
            before, after = self.previous_step_seconds * 1e3, self.step_seconds * 1e3
            text += f"; predicted compute time {before:.1f} -> {after:.1f} ms"
        if self.step_seconds_if_all_used is not None:
            which = " ".join(map(str, self.unused))
            text += f"; without using {which}, {self.step_seconds_if_all_used * 1e3:.1f} ms with it"
        return text + ")"


class BalancePolicy(abc.ABC):
    """Base class for custom balance policies, which choose shares from measured compute times.

    `propose(-1)` returns the first plan, the same on every worker. After that only the chief's
    policy receives `observe`, once or more in a row, and then `propose`; the other methods reach
    the policies of all workers. A plan comes into effect some steps later: `observe` receives the
    shares that were really used.

    A subclass defines `name` and `shares` (attributes or properties), `observe`, `propose`,
    `set_upper` and `set_global_batch_size`. The other methods ignore what they receive by default.
    Make an instance for as many replicas as all workers have together; if its `shares` sum to
    another batch than `fit` has, `set_global_batch_size` is called before `propose(-1)`.

    Example:
        >>> import numpy as np
        >>> from keras_het.planning import BalancePlan, BalancePolicy, proportional_shares
        >>> class LatestSpeeds(BalancePolicy):
        ...     name = "latest_speeds"
        ...     shares = ()
        ...
        ...     def __init__(self, num_replicas, global_batch_size):
        ...         self.speeds = np.ones(num_replicas)
        ...         self.upper = np.full(num_replicas, 2**30)
        ...         self.set_global_batch_size(global_batch_size)
        ...
        ...     def observe(self, step, shares, seconds):
        ...         known = (shares > 0) & np.isfinite(seconds)
        ...         self.speeds[known] = shares[known] / seconds[known]
        ...
        ...     def propose(self, step):
        ...         best = proportional_shares(self.total, self.speeds, upper=self.upper)
        ...         if step >= 0 and tuple(best) == self.shares:
        ...             return None
        ...         self.shares = tuple(best.tolist())
        ...         return BalancePlan(step, self.name, self.shares, "latest speeds")
        ...
        ...     def set_upper(self, replica, samples):
        ...         self.upper[replica] = samples
        ...
        ...     def set_global_batch_size(self, samples):
        ...         self.total = samples
        >>> policy = LatestSpeeds(2, 12)
        >>> str(policy.propose(-1))
        'initial shares 6 6 (latest_speeds: latest speeds)'
        >>> policy.observe(0, np.array([6, 6]), np.array([0.06, 0.12]))
        >>> str(policy.propose(0))
        'step 0: shares 8 4 (latest_speeds: latest speeds)'
    """

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """Name of the policy, as users pass it."""

    @property
    @abc.abstractmethod
    def shares(self) -> tuple[int, ...]:
        """Shares of the last plan; they sum to the global batch."""

    @property
    def models(self) -> Sequence[LinearTimeModel | None]:
        """The time model of each replica, None for those that were never measured."""
        return (None,) * len(self.shares)

    @abc.abstractmethod
    def observe(self, step: int, shares: ArrayLike, seconds: ArrayLike) -> None:
        """Record a measured step, or the median of short ones in a row with the same shares.

        Args:
            step: number of the step, or of the last of them.
            shares: samples each replica really computed, int [n]. They sum to less than the global
                batch in a partial last batch.
            seconds: compute time of each replica, float64 [n]; NaN if unknown, such as for a
                replica without samples and for a step that compiles.
        """

    @abc.abstractmethod
    def propose(self, step: int) -> BalancePlan | None:
        """Decide whether to change shares.

        Args:
            step: number of the step that was observed last.

        Returns:
            A plan, if shares should change; the first call always returns the first plan.
        """

    @abc.abstractmethod
    def set_upper(self, replica: int, samples: int) -> None:
        """Bound a replica's share, for instance because it ran out of memory.

        Args:
            replica: index of the replica.
            samples: largest share from now on.
        """

    @abc.abstractmethod
    def set_global_batch_size(self, samples: int) -> None:
        """Change the number of samples that shares sum to.

        Args:
            samples: the new global batch size.
        """

    def start_from(self, weights: ArrayLike) -> None:
        """Base the first plan on given proportions, before the first `propose`.

        Not called for a policy with the name "even" or "static".

        Args:
            weights: one weight for each replica, zero or more, float [n].
        """

    def recall(
        self, models: Sequence[LinearTimeModel | None], shares: Sequence[int] | None = None
    ) -> None:
        """Base the first plan on times known from before, before the first `propose`.

        Args:
            models: the time model of each replica, None for unknown ones.
            shares: shares that were found for these replicas; by default the optimum for `models`.
        """

    def set_micro_batch_size(self, replica: int, samples: int) -> None:
        """Note how many samples a replica computes at a time, once its memory is known.

        Args:
            replica: index of the replica.
            samples: most samples, no fewer than it has computed so far.
        """

    def observe_step_seconds(self, seconds: float) -> None:
        """Record the total duration of the steps about to be passed to `observe`.

        Args:
            seconds: mean time of a step, including the collective and everything else.
        """

    def observe_new_share_seconds(self, seconds: float) -> None:
        """Record how much longer a replica's first steps with a new share take.

        Args:
            seconds: time of compilation, or of cuDNN's search for algorithms; 0 if unknown.
        """


class SharePolicy(BalancePolicy):
    """Base class that handles bounds, the first plan, and waiting until a plan is in effect.

    Subclasses override `record` and `decide`, and return what they decide by `adopt`. By default,
    shares stay even.

    Args:
        num_replicas: number of replicas, n.
        global_batch_size: samples that shares sum to.
        lower: smallest share of each replica, int [n]; by default 0.
        upper: largest share of each replica, int [n]; by default no bound.
        granularity: shares are multiples of this many samples, or "auto"; see `BatchBalancer`.

    Raises:
        TypeError: if a number is not whole.
        ValueError: if no shares satisfy the bounds.
    """

    name = ""

    def __init__(
        self,
        num_replicas: int,
        global_batch_size: int,
        *,
        lower: ArrayLike | None = None,
        upper: ArrayLike | None = None,
        granularity: Granularity = 1,
    ) -> None:
        check_granularity(granularity)
        self._granularity = granularity
        self._lower, _ = check_bounds(global_batch_size, num_replicas, lower, upper)
        given = np.iinfo(np.int64).max if upper is None else np.asarray(upper)
        self._given_upper: IntArray = np.broadcast_to(given, (num_replicas,)).astype(np.int64)
        self._total = int(global_batch_size)
        self._current = self._proportional(np.ones(num_replicas))
        self._in_effect = 0
        self._first_reason: str | None = "even split"  # until the first plan is proposed
        self._bounds_changed = False

    @property
    def shares(self) -> tuple[int, ...]:
        return tuple(self._current.tolist())

    def start_from(self, weights: ArrayLike) -> None:
        self._current = self._proportional(np.asarray(weights, np.float64))
        if self._first_reason is not None:
            self._first_reason = "shares of the strategy"

    def observe(self, step: int, shares: ArrayLike, seconds: ArrayLike) -> None:
        """Record one step, as `BalancePolicy.observe`; refuse other numbers of replicas."""
        used, times = np.asarray(shares, np.int64), np.asarray(seconds, np.float64)
        if used.shape != self._current.shape or times.shape != self._current.shape:
            raise ValueError(
                f"There must be one share and one time for each of {len(self._current)} replicas. "
                f"Received: shares of shape {used.shape} and seconds of shape {times.shape} in "
                f"step {step}. Use NaN for times that are not known."
            )
        matches = bool((used == self._current).all())
        self._in_effect += matches and bool(np.isfinite(times).any())
        self.record(used, times, matches)

    def propose(self, step: int) -> BalancePlan | None:
        """Decide whether to change shares, as `BalancePolicy.propose`."""
        if self._first_reason is not None:
            reason, self._first_reason = self._first_reason, None
            return BalancePlan(step, self.name, self.shares, reason)
        if self._bounds_changed:
            self._bounds_changed = False
            shares = tuple(self._within_bounds().tolist())
            reason = "bounds or batch size changed"
            return self.adopt(BalancePlan(step, self.name, shares, reason))
        return self.decide(step) if self._in_effect else None

    def set_upper(self, replica: int, samples: int) -> None:
        """Bound a replica's share; refuse a bound with which no shares sum to the batch."""
        if not 0 <= replica < len(self._current):
            raise IndexError(
                f"replica must be from 0 to {len(self._current) - 1}. Received: {replica}."
            )
        upper, lower = self._given_upper.copy(), self._lower.copy()
        upper[replica] = samples
        lower[replica] = min(lower[replica], max(samples, 0))
        check_bounds(self._total, len(upper), lower, upper)
        self._given_upper, self._lower = upper, lower
        self._bounds_changed |= bool(self._current[replica] > samples)

    def set_global_batch_size(self, samples: int) -> None:
        """Change the number of samples; refuse one that no shares within the bounds sum to."""
        check_bounds(samples, len(self._current), self._lower, self._given_upper)
        is_first = self._first_reason is not None
        self._bounds_changed |= int(samples) != self._total and not is_first
        self._total = int(samples)
        if is_first:
            self._current = self._within_bounds()

    @property
    def _upper(self) -> IntArray:
        return np.minimum(self._given_upper, self._total)

    def _proportional(self, weights: FloatArray) -> IntArray:
        """Return shares in proportion to weights; the granularity leaves no replica without any."""
        finest = proportional_shares(self._total, weights, self._lower, self._upper)
        low, high = np.maximum(self._lower, finest > 0), self._upper

        def solve(size: int) -> IntArray | None:
            return proportional_multiples(weights, self._total, size, low, high)

        def seconds(shares: IntArray) -> float:
            return float(np.max(shares[weights > 0] / weights[weights > 0]))

        return coarse_shares(self._granularity, finest, solve, seconds)

    def adopt(self, plan: BalancePlan) -> BalancePlan:
        """Make a plan the current one, and return it."""
        self._current = np.array(plan.shares, np.int64)
        self._in_effect = 0
        return plan

    def _within_bounds(self) -> IntArray:
        """Return new shares in the old proportions, after bounds or batch size changed."""
        return self._proportional(np.maximum(self._current, 1e-6).astype(np.float64))

    def record(self, shares: IntArray, seconds: FloatArray, matches: bool) -> None:
        """Note a step.

        Args:
            shares: samples of each replica, int [n].
            seconds: compute time of each replica, float [n]; NaN if unknown.
            matches: whether the step had the shares of the last plan.
        """

    def decide(self, step: int) -> BalancePlan | None:
        """Return a plan in place of the last one, or None; called only while that is in effect."""
        return None


class EvenPolicy(SharePolicy):
    """Every replica gets the same number of samples, as in plain data parallelism.

    The split of `tf.distribute.MirroredStrategy` and of PyTorch's DistributedDataParallel: a step
    takes as long as the slowest replica. The baseline for all other policies.

    Args:
        num_replicas: number of replicas, n.
        global_batch_size: samples that shares sum to.
        lower: smallest share of each replica, int [n]; by default 0.
        upper: largest share of each replica, int [n]; by default no bound.
        granularity: samples of which shares are multiples, or "auto", see `BatchBalancer`.

    Reference:
        Chen et al., "Revisiting Distributed Synchronous SGD", 2016, arXiv:1604.00981.
    """

    name = "even"


class StaticPolicy(SharePolicy):
    """Shares in proportion to weights that never change.

    The open-loop split of Tyagi and Sharma: weights are known speeds, such as the number of cores
    or samples per second of a benchmark.

    Args:
        num_replicas: number of replicas, n.
        global_batch_size: samples that shares sum to.
        weights: one weight for each replica, zero or more, at least one positive; by default even.
        lower: smallest share of each replica, int [n]; by default 0.
        upper: largest share of each replica, int [n]; by default no bound.
        granularity: samples of which shares are multiples, or "auto", see `BatchBalancer`.

    Raises:
        TypeError: if a bound is not whole, or weights are neither a list nor a dict of numbers.
        ValueError: if a weight is not valid, or no shares satisfy the bounds.

    Reference:
        Tyagi and Sharma, "Taming Resource Heterogeneity In Distributed ML Training With Dynamic
        Batching", ACSOS 2020, section on static batching. The formula printed there lacks the
        factor "number of workers times base batch", which the sum requires.
    """

    name = "static"

    def __init__(
        self,
        num_replicas: int,
        global_batch_size: int,
        *,
        weights: Weights | None = None,
        lower: ArrayLike | None = None,
        upper: ArrayLike | None = None,
        granularity: Granularity = 1,
    ) -> None:
        weights = [1.0] * num_replicas if weights is None else weights
        given = np.asarray(weight_of_each("weights", weights, num_replicas), np.float64)
        if given.shape != (num_replicas,):
            raise ValueError(
                f"There must be one weight for each of {num_replicas} replicas. "
                f"Received: {weights}."
            )
        bounds = {"lower": lower, "upper": upper}
        super().__init__(num_replicas, global_batch_size, **bounds, granularity=granularity)
        self._weights: FloatArray = given
        self._current = self._proportional(given)
        self._first_reason = "weights " + " ".join(f"{weight:g}" for weight in given[:16])

    def _within_bounds(self) -> IntArray:
        return self._proportional(self._weights)
