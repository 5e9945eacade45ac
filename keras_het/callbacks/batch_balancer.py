"""Give each replica the share with which all finish at the same time."""

from __future__ import annotations

import collections
import functools
import inspect
import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from keras_het.fit.memory_bounds import (
    MemoryBounds,
    largest_share_that_fits,
    note_out_of_memory,
    replicas_without_memory,
)
from keras_het.fit.model_strategy import data_of_fit, heterogeneous_strategy, tell
from keras_het.fit.session import Rank, SessionCallback
from keras_het.fit.share_bounds import (
    Bound,
    check_share_bounds,
    each_bound,
    num_replicas_named,
)
from keras_het.planning import BalancePlan, BalancePolicy, apportion, make_policy
from keras_het.planning.balance import POLICIES
from keras_het.planning.balance.summary import summarize
from keras_het.planning.bounded_shares import MAX_TOTAL, FloatArray, IntArray
from keras_het.strategy.measure.compute_times import StepTimes
from keras_het.strategy.measure.reading_interval import ReadingInterval
from keras_het.training_strategy import TrainingStrategy

_WARM_UP = 2.0
_FIXED_POLICIES = ("even", "static")


class BatchBalancer(SessionCallback):
    r"""Callback that splits the global batch by every replica's measured compute time.

    With compute times :math:`t_i(b_i)` of shares :math:`b_i`, a step takes :math:`\max_i t_i(b_i)`;
    the balancer finds the shares that minimize this maximum and sum to the global batch. The global
    batch stays the same, and every step is exact for any shares, so the results equal those of
    training without it.

    Compute times are measured inside the training step, before the collective: an all-reduce is a
    barrier, which makes step times equal on all replicas. They travel in the step's existing
    collective, as does the chief's decision: all workers change shares after the same step.

    Args:
        policy: "boa" (the exact min-max program over fitted times), "even", "static", or an object
            with the methods of `keras_het.planning.BalancePolicy`.
        max_share: largest share of each replica in samples, for instance the limit of its memory:
            one number for all, a list with one for each replica (None for no bound), or a dict from
            replica to number.
        min_share: smallest share of each replica, in the same form. By default 1 for the policies
            that measure, because a device without a share computes a row of zeros anyway; 0 allows
            them to give a replica nothing.
        memory_directory: directory, shared by all workers, that records across restarts which share
            was too large for a replica's memory; such a bound acts like `max_share`.
        verbose: 1 prints every plan on the chief; plans are always logged at level INFO.
        keep_measurements: number of steps whose measurements are kept.
        **options: further arguments of the policy, such as `dead_band` of "boa" or `weights` of
            "static".

    Attributes:
        plans: all `keras_het.planning.BalancePlan`s so far, oldest first; on workers other than the
            chief, with the shares only.
        measurements: the latest steps as dicts of "step", "shares" (samples) and "seconds" (compute
            time), each with one number for each replica.

    Raises:
        ValueError: if the policy does not exist, bounds contradict each other, or a setting of the
            policy is out of its range; by `fit`, if the model does not train under a
            `keras_het.HeterogeneousStrategy`, or another `BatchBalancer` is in the same `fit`.
        TypeError: if a bound is not a whole number, or the policy has no such setting.

    Reference:
        Yang, Kang and Youn, "BOA: batch orchestration algorithm for straggler mitigation of
        distributed DL training in heterogeneous GPU cluster", The Journal of Supercomputing 76,
        2020.
    """

    def __init__(
        self,
        policy: str | BalancePolicy = "boa",
        *,
        max_share: Bound = None,
        min_share: Bound = None,
        memory_directory: str | Path | None = None,
        verbose: int = 0,
        keep_measurements: int = 1000,
        **options: Any,
    ) -> None:
        super().__init__()
        # A wrong argument should fail here, not after an hour.
        check_share_bounds(min_share, max_share)
        _check_options(policy, min_share, max_share, options)
        if not isinstance(policy, str) and min_share is not None:
            raise TypeError(
                "min_share goes with a policy's name. Received: min_share="
                f"{min_share!r} and the policy {policy!r}. Give the bounds to the policy itself."
            )
        self._interval = ReadingInterval()
        self._first_steps: list[StepTimes] = []
        self._warms_up = False
        self._latest_reading: float | None = None
        self._given_policy = policy
        self._max_share, self._min_share = max_share, min_share
        self._options = options
        self._memory = MemoryBounds(memory_directory) if memory_directory is not None else None
        self._verbose = verbose
        self._policy: BalancePolicy | None = None
        self._global_batch_size = 0
        self._used_shares: tuple[int, ...] = ()
        self._step = 0
        self.plans: list[BalancePlan] = []
        self.measurements: collections.deque[dict[str, Any]] = collections.deque(
            maxlen=keep_measurements
        )

    def on_train_begin(self, logs: Mapping[str, float] | None = None) -> None:
        """Start measuring."""
        strategy = heterogeneous_strategy(self.model, self)
        fit = self._fit_session
        others = [each for each in fit.callbacks if each is not self] if fit is not None else []
        if any(isinstance(each, BatchBalancer) for each in others):
            raise ValueError(
                "Two BatchBalancers in one fit would take back each other's shares. Received: "
                f"{type(self).__name__}({self._policy_name!r}) and another one. Leave one of them "
                "out."
            )
        strategy.measure_compute_times(self.model)
        self._interval = ReadingInterval()
        # Steps and wishes of fits in between do not belong to this balancer.
        strategy.compute_times.read_new()
        wanted = self.plans[-1].shares if self.plans else [0] * len(strategy.shares)
        strategy.compute_times.send_shares(wanted)
        if fit is not None:
            fit.add_layer(
                Rank.NOTE_MEMORY, functools.partial(note_out_of_memory, self._out_of_memory)
            )
        # Keras has inspected the first batch, which determines the size of the global batch: bounds
        # and weights apply from the first step.
        data = data_of_fit(self.model, strategy)
        if hasattr(data, "refuse_shares"):
            data.refuse_shares("BatchBalancer")
        is_latest = data is not None and data is strategy.iterated_data
        before = strategy.latest_shares if is_latest else ()
        if total := sum(before) or int(getattr(data, "global_batch_size", None) or 0):
            begin = self._start if self._policy is None else self._go_on
            begin(strategy, total)
            if self._used_shares and apportion(total, self._used_shares) != before:
                data.cut_again()

    def on_train_batch_end(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Decide after every step, or after several if steps are short."""
        if self._interval.is_due():
            self._read()

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Restart the step clock, because validation does not count as a step."""
        self._latest_reading = None

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Decide after the last step of the epoch."""
        # Validation and other callbacks came before this point; they are not steps.
        self._latest_reading = None
        self._read()

    def on_train_end(self, logs: Mapping[str, float] | None = None) -> None:
        """Read the remaining measurements."""
        self._read(is_last=True)

    @property
    def _policy_name(self) -> str:
        given = self._given_policy
        return given if isinstance(given, str) else given.name

    def _read(self, is_last: bool = False) -> None:
        strategy = heterogeneous_strategy(self.model, self)
        steps = strategy.compute_times.read_new()
        if not steps:
            return
        if self._step == 0 and len(steps) + len(self._first_steps) < 2 and not is_last:
            self._first_steps = steps  # the next step shows whether it is a warm-up
            return
        steps, self._first_steps = [*self._first_steps, *steps], []
        self._note_whole_steps(len(steps))
        self._warms_up = self._step == 0 and _is_warm_up(steps)
        for group in self._interval.groups(steps):
            self._observe(strategy, group)
        self._interval.was_read(steps)
        if self._policy is not None and strategy.is_chief:
            self._decided(strategy, self._policy.propose(self._step - 1))
        self._follow(strategy, tuple(steps[-1].wanted_shares.tolist()))

    def _note_whole_steps(self, count: int) -> None:
        """Report total step times to the policy; these are the times that matter in the end."""
        now, before = time.perf_counter(), self._latest_reading
        self._latest_reading = now
        note = getattr(self._policy, "observe_step_seconds", None)
        if note is not None:
            note(0.0 if before is None else (now - before) / count)

    def _observe(self, strategy: TrainingStrategy, steps: list[StepTimes]) -> None:
        """Record steps with the same shares, which count as one."""
        shares = steps[-1].shares
        total = int(shares.sum())
        _check_same_shares(shares, np.mean([step.mean_shares for step in steps], axis=0))
        if self._policy is None:
            self._start(strategy, total)
        elif total > self._global_batch_size:
            self._global_batch_size = total
            self._policy.set_global_batch_size(total)
        # A replica without a share computes a row of zeros: its time says nothing about samples.
        seconds = [np.where(shares > 0, step.seconds, np.nan) for step in steps]
        is_warm_up = self._step == 0 and self._warms_up
        for each in seconds:
            row = {"step": self._step, "shares": shares.tolist(), "seconds": each.tolist()}
            self.measurements.append(row)
            self._step += 1
        if self._policy is not None and strategy.is_chief:
            unknown = np.full(len(shares), np.nan)
            median = unknown if is_warm_up else np.median(seconds, axis=0)
            self._policy.observe(self._step - 1, shares, median)

    def _start(self, strategy: TrainingStrategy, total: int) -> None:
        """Make the first plan, which depends on no measurement and is equal on all workers."""
        self._global_batch_size = total
        self._policy = self._make_policy(strategy, total)
        is_adaptive = self._policy.name not in _FIXED_POLICIES
        if is_adaptive and len(set(strategy.shares)) > 1 and hasattr(self._policy, "start_from"):
            self._policy.start_from(strategy.shares)
        plan = self._policy.propose(-1)
        if plan is not None:
            self._note(strategy, plan)
            self._used_shares = plan.shares
            strategy.set_shares(plan.shares)
            strategy.compute_times.send_shares(plan.shares)

    def _go_on(self, strategy: TrainingStrategy, total: int) -> None:
        """Start another fit with this balancer: its shares apply again, to batches of that size."""
        if self._used_shares:
            strategy.set_shares(self._used_shares)
            self._tell_change(BalancePlan(-1, self._policy_name, self._used_shares, "as before"))
        data = data_of_fit(self.model, strategy)
        size = int(getattr(data, "global_batch_size", None) or total)
        # A single smaller batch may be the remainder of some data, not another size.
        is_rest = size < (self._global_batch_size or 0) and data.cardinality == 1
        if size != self._global_batch_size and size >= len(strategy.shares) and not is_rest:
            self._global_batch_size = size
            if self._policy is not None:
                self._policy.set_global_batch_size(size)

    def _decided(self, strategy: TrainingStrategy, plan: BalancePlan | None) -> None:
        """Send the chief's decision to all workers with the next step."""
        if plan is None:
            return
        self._note(strategy, plan)
        strategy.compute_times.send_shares(plan.shares)
        if strategy.num_workers == 1:
            self._used_shares = plan.shares
            strategy.set_shares(plan.shares)

    def _follow(self, strategy: TrainingStrategy, wanted: tuple[int, ...]) -> None:
        """Apply the chief's wish on all workers after the same step."""
        if strategy.num_workers == 1 or not any(wanted) or wanted == self._used_shares:
            return
        self._used_shares = wanted
        strategy.set_shares(wanted)
        if not strategy.is_chief:
            name = self._policy.name if self._policy is not None else ""
            self._note(strategy, BalancePlan(self._step - 1, name, wanted, "the chief's decision"))

    def _note(self, strategy: TrainingStrategy, plan: BalancePlan) -> None:
        self.plans.append(plan)
        tell(plan, strategy, self._verbose)
        self._tell_change(plan)

    def _tell_change(self, plan: BalancePlan) -> None:
        if (fit := self._fit_session) is not None:
            # a change has a step of its own: the first one after the plan
            fit.note_change("shares", str(plan).partition(": ")[2])

    def _make_policy(self, strategy: TrainingStrategy, total: int) -> BalancePolicy:
        num_replicas = len(strategy.shares)
        # A later global batch may be larger than this one.
        upper = each_bound(self._max_share, num_replicas, MAX_TOTAL, MAX_TOTAL)
        for replica, most in (self._memory.read() if self._memory else {}).items():
            if replica < num_replicas:
                upper[replica] = min(upper[replica], most)
        if not isinstance(self._given_policy, str):
            policy = make_policy(self._given_policy, num_replicas, total, **self._options)
            for replica, most in enumerate(upper):
                if most < MAX_TOTAL:
                    policy.set_upper(replica, most)
            return policy
        options = {**self._options, "upper": upper}
        least = self._least_share(strategy, total)
        lower = each_bound(self._min_share, num_replicas, least, total)
        if self._min_share is None:
            lower = [min(pair) for pair in zip(lower, upper, strict=True)]
        options["lower"] = lower
        if self._given_policy == "static":
            options.setdefault("weights", strategy.shares)
        return make_policy(self._given_policy, num_replicas, total, **options)

    def _least_share(self, strategy: TrainingStrategy, total: int) -> int:
        """Return the number of samples every replica gets by default.

        A real device without a share computes a row of zeros, which takes as long as one sample:
        giving it no samples gains nothing. An emulated device then takes no time.
        """
        is_fixed = self._given_policy in _FIXED_POLICIES
        few_samples = total < len(strategy.shares)
        return 0 if is_fixed or few_samples or strategy.emulated_devices is not None else 1

    def _out_of_memory(self, message: str) -> str:
        """Record the bound; return the message for the user."""
        strategy = heterogeneous_strategy(self.model, self)
        first = strategy.layout.local_replicas.start
        devices = strategy.extended.worker_devices
        shares = strategy.latest_shares
        bounds = {
            replica: largest_share_that_fits(replica, shares[replica], self.measurements)
            for replica in replicas_without_memory(message, devices, first)
        }
        if self._memory is None:
            return (
                f"Out of memory on replica(s) {sorted(bounds)}. Start again with BatchBalancer("
                f"max_share={bounds}), or with memory_directory=... to have it remembered."
            )
        for replica, samples in bounds.items():
            self._memory.write(replica, samples)
        return (
            f"Out of memory on replica(s) {sorted(bounds)}. Start all workers again: BatchBalancer "
            f"remembers max_share={bounds}."
        )

    def set_max_share(self, replica: int, samples: int) -> None:
        """Bound a replica's share from the next plan on; call it at least on the chief.

        Args:
            replica: id of the replica among all workers' replicas.
            samples: its largest share.

        Raises:
            RuntimeError: if no step has been measured yet; pass `max_share` instead.
        """
        if self._policy is None:
            raise RuntimeError(
                "No step was measured yet, so that the size of the global batch is not known. Give "
                "BatchBalancer(max_share=...) instead."
            )
        self._policy.set_upper(replica, samples)

    def summary(self) -> str:
        """Return in a few lines what the balancer has done, for `print`.

        The compute time of a step now and with even shares, the shares at first and now, the time
        of a sample on each replica, and which plans were taken back, and why. Before the first
        measurement it says that there is none. Times are of the latest measured steps.
        """
        return str(summarize(self._policy_name, self.plans, self.measurements))

    def to_dict(self) -> dict[str, Any]:
        """Return all plans and the kept measurements as plain Python values, for JSON."""
        plans = [plan.to_dict() for plan in self.plans]
        return {"plans": plans, "measurements": _without_nan(self.measurements)}

    def save(self, path: str | Path) -> None:
        """Write `to_dict()` to a JSON file; with several workers, only the chief writes.

        Args:
            path: the file.
        """
        strategy = heterogeneous_strategy(self.model, self)
        if strategy.is_chief:
            Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n")


def _check_options(
    policy: str | BalancePolicy, min_share: Bound, max_share: Bound, options: Mapping[str, Any]
) -> None:
    bounds = [each for each in (min_share, max_share) if not isinstance(each, Mapping)]
    named = num_replicas_named(*bounds, *options.values())
    try:
        make_policy(policy, named, named, **options)
    except TypeError as error:
        if not isinstance(policy, str) or "unexpected keyword" not in str(error):
            raise
        known = [
            name
            for name, parameter in inspect.signature(POLICIES[policy]).parameters.items()
            if parameter.kind is parameter.KEYWORD_ONLY and name not in ("lower", "upper")
        ]
        unknown = sorted(set(options) - set(known))
        raise TypeError(
            f"BatchBalancer does not know these arguments. Received: {unknown}. The policy "
            f"{policy!r} has {known}; bounds are min_share and max_share."
        ) from None


def _is_warm_up(steps: list[StepTimes]) -> bool:
    """Whether the first step loaded kernels and memory: it took far longer on all replicas."""
    first, *others = steps
    if not others:
        return False
    used = (first.shares > 0) & (others[0].shares > 0)
    return bool((first.seconds[used] > _WARM_UP * others[0].seconds[used]).all())


def _check_same_shares(shares: IntArray, mean_shares: FloatArray) -> None:
    difference = np.abs(mean_shares - shares)
    if (difference > 1e-3 * np.maximum(shares, 1)).any():
        raise RuntimeError(
            "The workers cut the same global batch into different shares: samples were left out or "
            f"used twice. Received: shares {shares.tolist()} on this worker, "
            f"{mean_shares.round(2).tolist()} on average over all replicas. Use the same "
            "callbacks with the same arguments on every worker."
        )


def _without_nan(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        {**row, "seconds": [None if value != value else value for value in row["seconds"]]}
        for row in rows
    ]
