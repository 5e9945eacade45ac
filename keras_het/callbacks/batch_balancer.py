"""Give each replica the share with which all finish at the same time."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sized
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from keras_het.device_names import gpu_name, product_names
from keras_het.fit.model_strategy import data_of_fit, heterogeneous_strategy, tell
from keras_het.fit.session import FitSession, Rank
from keras_het.fit.share_bounds import Bound, MemoryBounds, check_bound, start_policy, upper_bounds
from keras_het.planning import BalancePlan, BalancePolicy, apportion, make_policy
from keras_het.planning.argument_checks import check_folder, check_number, check_verbose
from keras_het.planning.balance.min_max import Granularity, check_granularity
from keras_het.planning.balance.summary import summarize
from keras_het.planning.diagnosis.recording import Device
from keras_het.planning.shares import Weights
from keras_het.planning.time_model import (
    KnownDevice,
    known_from_json,
    known_to_json,
    recall_times,
)
from keras_het.strategy.exact.xla import num_unsettled_steps
from keras_het.strategy.keras_calls import SessionCallback
from keras_het.strategy.measure.compute_times import MeasuredSteps, Reading
from keras_het.strategy.measure.memory_use import MemoryUse
from keras_het.strategy.measure.sampled_steps import SampledSteps
from keras_het.telemetry.step_recorder import devices_of

if TYPE_CHECKING:
    from keras_het.strategy.heterogeneous_strategy import HeterogeneousStrategy


class BatchBalancer(SessionCallback):
    r"""Callback that splits the global batch by every replica's measured compute time.

    With compute times :math:`t_i(b_i)` of shares :math:`b_i`, a step takes :math:`\max_i t_i(b_i)`;
    the balancer finds the shares that minimize this maximum and sum to the global batch. The global
    batch stays the same, and every step is exact for any shares, so the results equal
    those without it.

    Compute times are measured inside the training step, before the collective: an all-reduce is a
    barrier, which makes step times equal on all replicas. They travel in the step's existing
    collective, as does the chief's decision: all workers change shares after the same step.

    Args:
        policy: "min_max" (the exact min-max program over fitted times), "even", "static", or an
            instance of your own subclass of `keras_het.planning.BalancePolicy`.
        max_share: largest share of each replica in samples, for instance the limit of its memory:
            one number for all, a list with one for each replica (None for no bound), or a dict from
            replica to number.
        min_share: smallest share of each replica, in the same form; only with the name of a policy.
            By default 1 for "min_max", because a device without a share computes a row of zeros
            anyway; 0 allows it to give a replica nothing.
        granularity: round shares to multiples of this many samples; one replica, normally the
            fastest, takes the rest of a batch that is no multiple. Where the bounds rule that out,
            its largest divisor with which they do not takes its place. "auto" is 1 unless all
            workers compute on GPUs. There it is the largest :math:`g` of 8, 4, 2 and 1 with
            :math:`\max_i t_i(b_i^{(g)}) \le 1.02 \max_i t_i(b_i^{(1)})`, where :math:`b^{(g)}` are
            the best multiples of :math:`g` for the fitted times, or, before there are any, for
            :math:`t_i(b_i) = b_i / w_i` with weights :math:`w`: of 96 samples each of 8 equal
            replicas gets 12, because 16 for some would take a third longer. Not run on GPUs. Only
            with the name of a policy.
        memory_dir: directory, shared by all workers, that records across restarts which share
            was too large for a replica's memory; such a bound acts like `max_share`, or like
            `micro_batch_size` if the strategy has one.
        verbose: 1 prints every plan on the chief; plans are always logged at level INFO.
        history_size: number of steps whose measurements are kept.
        weights: share of each replica relative to the others, for "static"; by default the
            strategy's `share_weights`.
        dead_band: smallest predicted gain for which shares change, as a fraction of a step's
            compute time, for "min_max"; by default 0.025.
        least_gain_seconds: the same in seconds per step; by default 0.001.
        window: number of compute times kept for each replica, for "min_max"; by default 64.

    Attributes:
        plans: all `keras_het.planning.BalancePlan`s so far, oldest first; on workers other than the
            chief, with the shares only.
        measurements: the latest steps as dicts of "step", "shares" (samples) and "seconds" (compute
            time), each with one number for each replica.

    Raises:
        ValueError: if the policy does not exist, or a setting of it is out of its range; by `fit`,
            if bounds contradict each other, the model does not train under a
            `keras_het.HeterogeneousStrategy`, or another `BatchBalancer` is in the same `fit`.
        TypeError: if a setting belongs to another policy; by `fit`, if a bound is not a whole
            number.

    Reference:
        Yang, Kang and Youn, "BOA: batch orchestration algorithm for straggler mitigation of
        distributed DL training in heterogeneous GPU cluster", The Journal of Supercomputing 76,
        2020.
    """

    def __init__(
        self,
        policy: str | BalancePolicy = "min_max",
        *,
        max_share: Bound = None,
        min_share: Bound = None,
        granularity: Granularity = "auto",
        memory_dir: str | Path | None = None,
        verbose: int = 0,
        history_size: int = 1000,
        weights: Weights | None = None,
        dead_band: float | None = None,
        least_gain_seconds: float | None = None,
        window: int | None = None,
    ) -> None:
        super().__init__()
        check_bound("max_share", max_share)
        check_bound("min_share", min_share)
        check_granularity(granularity)
        check_folder("memory_dir", memory_dir, or_none=True)
        check_number("history_size", history_size, least=1, whole=True)
        check_verbose(verbose)
        settings = {
            "weights": weights,
            "dead_band": dead_band,
            "least_gain_seconds": least_gain_seconds,
            "window": window,
        }
        options: dict[str, Any] = {k: value for k, value in settings.items() if value is not None}
        # A wrong name or setting fails here, for as many replicas as there are weights.
        num_weights = len(weights) if isinstance(weights, Sized) else 1
        make_policy(policy, num_weights, num_weights, **options)
        own = {"min_share": (min_share, None), "granularity": (granularity, "auto")}
        for name, (value, default) in own.items():
            if not isinstance(policy, str) and value != default:
                raise TypeError(
                    f"{name} is only for a policy given by its name. Received: {name}={value!r} "
                    f"and the policy {policy!r}. Give it to the policy itself."
                )
        self._given_policy, self._options = policy, options
        self._granularity, self._all_gpus = granularity, False
        self._min_share, self._max_share = min_share, max_share
        self._memory = MemoryBounds(memory_dir)
        self._share_bounds: dict[int, int] = {}
        self._memory_use: MemoryUse | None = None
        self._upper: list[int] = []
        self._fitting: tuple[int, ...] = ()
        self._verbose = verbose
        self._strategy: HeterogeneousStrategy
        self._policy: BalancePolicy | None = None
        self._fit: FitSession | None = None
        self._global_batch_size = 0
        self._used_shares: tuple[int, ...] = ()
        self._begins = False
        self._devices: list[Device] = []
        self._known: dict[str, KnownDevice] = {}
        self._steps = MeasuredSteps(history_size)
        self._sampled: SampledSteps | None = None
        self.plans: list[BalancePlan] = []
        self.measurements = self._steps.rows

    def on_train_begin(self, logs: Mapping[str, float] | None = None) -> None:
        """Start measuring."""
        self._strategy = strategy = heterogeneous_strategy(self.model, self)
        self._fit = fit = self._fit_session
        if fit is not None:
            others = [each for each in fit.callbacks if each is not self]
            if any(isinstance(each, BatchBalancer) for each in others):
                raise ValueError(
                    "Two BatchBalancers in one fit would undo each other's shares. Received: "
                    f"BatchBalancer({self._policy_name!r}) and another one. Leave one of them out."
                )
            note_memory = functools.partial(self._memory.run_step, strategy, self.measurements)
            fit.add_layer(Rank.NOTE_MEMORY, note_memory)
            strategy.extended.training_state.export_times = self._export_times
            fit.on_end(lambda: setattr(strategy.extended.training_state, "export_times", None))
        self._share_bounds = self._memory.apply(strategy)
        if self._measures_memory:
            local, cuts = strategy.extended.worker_devices, strategy.extended.compute_times.cuts
            self._memory_use = self._memory_use or MemoryUse(strategy.layout, local, cuts)
            strategy.extended.compute_times.send_fitting(self._memory_use.fitting)
        strategy.extended.compute_times.begin(self.model)
        self._sampled = strategy._sample_steps(fit, self._sampled)
        unsettled, self._all_gpus = _gathered_facts(strategy, self.model)
        self._steps.begin(strategy.extended.compute_times, self._sampled, unsettled)
        # replaces what a balancer wanted in a fit in between
        latest = self.plans[-1].shares if self.plans else [0] * len(strategy.share_weights)
        strategy.extended.compute_times.send_shares(latest)
        data = data_of_fit(self.model, strategy)
        if hasattr(data, "refuse_shares"):
            data.refuse_shares("BatchBalancer")
        self._begins = True

    def _begin(self) -> None:
        """Apply the shares of an earlier fit, or of a first plan, from the first step on."""
        strategy, data = self._strategy, data_of_fit(self.model, self._strategy)
        # Keras has inspected the first batch, which shows the size of the global batch.
        is_latest = data is not None and data is strategy.extended.data_path.iterated()
        first = strategy.current_shares if is_latest else ()
        if total := sum(first) or int(getattr(data, "global_batch_size", None) or 0):
            if self._policy is None:
                self._start(total)
            else:
                self._go_on(self._policy, data, total)
            if self._used_shares and apportion(total, self._used_shares) != first:
                data.cut_again()

    def on_train_batch_end(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Decide after every step, or after several if steps are short."""
        if not self._steps.is_due():
            return
        readings = self._steps.read()
        if readings and self._memory_use and self._memory_use.note(readings[-1].shares):
            self._strategy.extended.compute_times.send_fitting(self._memory_use.fitting)
        self._balance(readings)

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Restart the step clock, because validation does not count as a step."""
        self._steps.pause()
        if self._begins:  # only now has every callback restored what a backup has
            self._begins = False
            self._begin()

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        self._steps.pause()  # validation and other callbacks came before this point
        self._balance(self._steps.read())

    def on_train_end(self, logs: Mapping[str, float] | None = None) -> None:
        self._balance(self._steps.read(is_last=True))

    def _balance(self, readings: list[Reading]) -> None:
        """Let the chief decide about the shares, and all workers follow it."""
        if not readings:
            return
        if self._policy is not None:
            if self._steps.step_seconds is not None:
                self._policy.observe_step_seconds(self._steps.step_seconds)
            self._policy.observe_new_share_seconds(self._steps.new_shares.seconds)
        for reading in readings:
            policy = self._policy_for(int(reading.shares.sum()))
            if self._strategy.is_chief:
                policy.observe(reading.step, reading.shares, reading.seconds)
        if self._strategy.is_chief:
            self._bound(policy, readings[-1].fitting)
        if self._strategy.is_chief and (plan := policy.propose(readings[-1].step)) is not None:
            self._note(plan)
            if self._sampled is not None:
                self._sampled.ask()  # the plan travels with measured steps, and is judged by them
            if self._strategy.num_workers > 1:
                self._strategy.extended.compute_times.send_shares(plan.shares)
            else:
                self._use(plan.shares)
        wanted = readings[-1].wanted_shares
        if self._strategy.num_workers > 1 and any(wanted) and wanted != self._used_shares:
            self._use(wanted)
            if not self._strategy.is_chief:
                step, name = readings[-1].step, policy.name
                self._note(BalancePlan(step, name, wanted, "the chief's decision"))

    def _policy_for(self, total: int) -> BalancePolicy:
        """Return the policy, which has to know of a step larger than those before."""
        if self._policy is None:
            return self._start(total)
        if total > self._global_batch_size:
            self._resize(self._policy, total)
        return self._policy

    def _start(self, total: int) -> BalancePolicy:
        """Make the first plan, which depends on no measurement and is equal on all workers."""
        self._global_batch_size = total
        given, options = self._given_policy, self._options
        size = 1 if self._granularity == "auto" and not self._all_gpus else self._granularity
        if size != 1 and isinstance(given, str):  # a policy object decides by itself
            options = {"granularity": size, **options}
        num_replicas = len(self._strategy.share_weights)
        self._upper = upper_bounds(self._max_share, self._share_bounds, num_replicas)
        bounds = self._min_share, self._upper
        self._policy = start_policy(given, self._strategy, total, options, *bounds)
        self._recall(self._policy)
        if (plan := self._policy.propose(-1)) is not None:
            self._note(plan)
            self._use(plan.shares)
            self._strategy.extended.compute_times.send_shares(plan.shares)
        return self._policy

    @property
    def _measures_memory(self) -> bool:
        """Whether shares are bounded, or cut, by what fits; a given size says what does."""
        strategy = self._strategy
        return strategy.extended.micro_batch_sizes is None or strategy.extended.compute_times.cuts

    def _bound(self, policy: BalancePolicy, fitting: tuple[int, ...]) -> None:
        """Follow what is known of memory: no share grows beyond it, or only in parts."""
        if fitting == self._fitting or not (any(fitting) or any(self._fitting)):
            return
        cuts, bounds = self._strategy.extended.compute_times.cuts, list(self._upper)
        for replica, samples in enumerate(fitting):
            if samples and not (cuts and samples > 0):
                latest = policy.shares[replica]
                bounds[replica] = min(bounds[replica], max(samples, latest))
        if sum(bounds) < self._global_batch_size:  # its first plan for larger batches is to come
            return
        self._fitting = fitting
        for replica, (samples, most) in enumerate(zip(fitting, bounds, strict=True)):
            policy.set_upper(replica, most)
            if cuts and samples > 0:
                policy.set_micro_batch_size(replica, samples)

    def _recall(self, policy: BalancePolicy) -> None:
        """Start from what a backup knows of these devices, or of others of their products."""
        extended = self._strategy.extended
        state, local = extended.training_state, extended.worker_devices
        self._devices = devices_of(self._strategy, local, product_names(local))
        self._known = known_from_json(state.restored_times)
        state.restored_times = ""
        devices = [(each.identity, each.model) for each in self._devices]
        times, shares = recall_times(self._known, devices)
        if self._memory_use and self._strategy.extended.compute_times.cuts:
            for replica, each in enumerate(times):
                if size := getattr(each, "micro_batch_size", 0):
                    self._memory_use.start_from(replica, size)
                    policy.set_micro_batch_size(replica, size)
            self._strategy.extended.compute_times.send_fitting(self._memory_use.fitting)
        policy.recall(times, shares)

    def _export_times(self) -> str:
        """Return what is known of the devices for a backup, also of those that are gone."""
        known = {name: replace(each, share=None) for name, each in self._known.items()}
        if self._devices and (policy := self._policy) is not None:
            measured = zip(self._devices, policy.models, policy.shares, strict=True)
            known |= {
                device.identity: KnownDevice(device.model, times, share)
                for device, times, share in measured
                if device.identity and times is not None
            }
        return known_to_json(known)

    def _go_on(self, policy: BalancePolicy, data: Any, total: int) -> None:
        """Start another fit with this balancer: its shares apply again, to batches of that size."""
        if self._used_shares:
            self._use(self._used_shares)
            self._tell_change(BalancePlan(-1, policy.name, self._used_shares, "as before"))
        size = int(getattr(data, "global_batch_size", None) or total)
        # A single smaller batch may be the remainder of some data, not another size.
        is_rest = size < self._global_batch_size and data.cardinality == 1
        if (
            size != self._global_batch_size
            and size >= len(self._strategy.share_weights)
            and not is_rest
        ):
            self._resize(policy, size)

    def _resize(self, policy: BalancePolicy, total: int) -> None:
        self._global_batch_size = total
        if any(self._fitting):  # more is known after the next step
            self._fitting = ()
            for replica, most in enumerate(self._upper):
                policy.set_upper(replica, most)
        policy.set_global_batch_size(total)

    def _use(self, shares: tuple[int, ...]) -> None:
        self._used_shares = shares
        self._strategy.set_share_weights(shares)

    def _note(self, plan: BalancePlan) -> None:
        self.plans.append(plan)
        tell(plan, self._strategy, self._verbose)
        self._tell_change(plan)

    def _tell_change(self, plan: BalancePlan) -> None:
        if self._fit is not None:
            # a change has its own step: the first one after the plan
            text = str(plan)
            self._fit.note_change("shares", text[text.index("shares") :])

    def summary(self) -> str:
        """Return in a few lines what the balancer has done, for `print`.

        The compute time of a step now and with even shares, the shares at first and now, the time
        of a sample on each replica, and which plans were reverted, and why. Before the first
        measurement it says that there is none. Times are of the latest measured steps. On the chief
        it also says how many samples fit into memory, where devices count their bytes.
        """
        text = str(summarize(self._policy_name, self.plans, self.measurements))
        fitting = enumerate(self._fitting)
        if known := [f"{most} on {replica}" for replica, most in fitting if most > 0]:
            text += f"\nSamples that fit into a replica's memory: {', '.join(known)}."
        return text

    def to_dict(self) -> dict[str, Any]:
        """Return all plans and the kept measurements as plain Python values, for JSON."""
        rows = [
            {**row, "seconds": [None if np.isnan(each) else each for each in row["seconds"]]}
            for row in self.measurements
        ]
        return {"plans": [plan.to_dict() for plan in self.plans], "measurements": rows}

    def save(self, path: str | Path) -> None:
        """Write `to_dict()` to a JSON file; with several workers, only the chief writes.

        Args:
            path: the file.
        """
        if heterogeneous_strategy(self.model, self).is_chief:
            Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    @property
    def _policy_name(self) -> str:
        given = self._given_policy
        return given if isinstance(given, str) else given.name


def _gathered_facts(strategy: HeterogeneousStrategy, model: keras.Model) -> tuple[int, bool]:
    """Return how many steps of a new share say nothing, and whether all compute on GPUs only."""
    local = strategy.extended.worker_devices
    unsettled, is_on_gpus = num_unsettled_steps(model, local), all(map(gpu_name, local))
    own = np.array([[unsettled, is_on_gpus]], np.int64)
    facts = strategy.extended.gather_over_workers(own)
    return int(facts[:, 0].max()), bool(facts[:, 1].all())
