"""Let slow workers train independently alongside a synchronous group, in one `fit`."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import keras

from keras_het.asynchronous.exchange import (
    AsyncWorker,
    HybridOptions,
    Participant,
    ServiceTask,
    SyncGroup,
)
from keras_het.asynchronous.exchange.pace import FIRST_PERIOD
from keras_het.asynchronous.exchange.role_choice import MEASURED_STEPS, RoleChoice, start_again
from keras_het.asynchronous.parameter_service import FloatWire, TopKWire, Wire
from keras_het.asynchronous.parameter_service.sample_ledger import LARGEST_EPOCH
from keras_het.asynchronous.parameter_service.wire import PARTITION_BYTES
from keras_het.fit.model_strategy import (
    check_keeps_weights,
    heterogeneous_strategy,
    say_nothing_is_exchanged,
    tell,
)
from keras_het.fit.session import FitSession, Rank, ShorterEpochs, StepFunction
from keras_het.planning import RolePlan
from keras_het.planning.argument_checks import check_number, check_one_of, check_verbose, expect
from keras_het.rules import RULES, ElasticAveraging, UpdateRule, get
from keras_het.stability import experimental
from keras_het.strategy.batches.uneven_per_replica import find_sizes
from keras_het.strategy.cluster.cluster_config import CHOSEN_ROLES, ClusterConfig, config_of
from keras_het.strategy.keras_calls import SessionCallback
from keras_het.strategy.measure.compute_times import CAPACITY

if TYPE_CHECKING:
    from keras_het.loader import GlobalOrderDataset
    from keras_het.loader.input.data_pass import Claims
    from keras_het.loader.nested import StepInput
    from keras_het.strategy.heterogeneous_strategy import HeterogeneousStrategy

_logger = logging.getLogger(__name__)
_PERIOD = 8


@experimental
class AsyncWorkers(SessionCallback):
    r"""All-reduce among the fast workers, a parameter service for the slow ones.

    Workers with the job `worker` (and `chief`) in TF_CONFIG train synchronously as without it.
    Workers with the job `async` run the same script, train on their own replicas, and exchange with
    the *center* weights every `period` steps; the sync group's leader does so in its own memory.
    With the rule "delta",

    .. math:: c \leftarrow c + (x_i - x_i^\text{seen}), \qquad x_i \leftarrow c + \text{own progress
              since},

    progress of each participant reaches all others, and none ever waits for a slower one.
    Participants share every epoch: the sync group or one async worker takes each global batch, and
    faster ones take more. `evaluate`, `save` and other callbacks see the center's weights at the
    end of an epoch and of training.

    Async workers can also train without a sync group: a task with the job `ps`, which runs the same
    script, then holds the center and saves it.

    With a job `async` in TF_CONFIG, a `fit` without this callback gets one with the defaults;
    without that job it does nothing. All tasks need the same arguments and the secret
    `KERAS_HET_SECRET`.

    Args:
        rule: name, dict or instance of a `keras_het.rules.UpdateRule`.
        period: steps between two exchanges; for rules that send gradients, steps over which an
            async worker accumulates one. "auto" chooses one per worker from times measured in
            training, such that all exchange at about the same rate (`planning.plan_pushes`), nobody
            waits for an answer for longer than it computes, and the work for an exchange takes a
            tenth of the time at most ("delayed_nesterov": the slowest takes the rule's period); for
            rules in which workers do not wait for each other. Default: "auto" for rules whose
            workers send their changes, such as "delta", else 8.
        async_batch_size: samples in each of an async worker's steps. Default: the global batch over
            the number of workers in the sync group. A worker that takes more steps of an epoch than
            it has batches ends its last epoch early; the others use the rest.
        max_staleness: number of center updates since a worker last saw it, beyond which its push
            is rejected: the worker restarts from the center, keeping its own progress. None for no
            bound.
        on_service_loss: "raise", or "continue" to let an async worker keep training alone until the
            service is back; not for rules that leave the optimizer step to the service.
        service_placement: "auto": on the tasks of the job `ps` if TF_CONFIG has them, else in the
            sync group's leader. "sharded": in equal parts on every member of the sync group and
            every task `ps`.
        timeout_seconds: timeout of each message.
        startup_timeout_seconds: how long an async worker waits for the service to start.
        shutdown_timeout_seconds: how long the sync group waits at its end for async workers that
            are present; it waits once more for those that learn late that training is over.
        communication_dtype: "float16" or "bfloat16": weights and changes travel rounded to that
            type, and what is lost is added to the next push. Default: they travel as they are.
        top_k_ratio: fraction of the values that a push carries, the largest ones, above 0 and at
            most 1; the others are added to the next push. Default: all.
        roles: "tf_config": the roles in TF_CONFIG. "auto", if TF_CONFIG lists all tasks as workers:
            the first steps are measured with all workers in the sync group; then
            `planning.advise_roles` chooses between that, some asynchronous and some left out, and
            reports its prediction for each. If roles change, every process restarts its script with
            the new roles in TF_CONFIG, or exits; the training of the measured steps is discarded.
        profile_steps: steps to measure, after some warm-up; at most 256.
        noise_scale: gradient noise scale in samples, for `roles="auto"`: the larger it is, the less
            staleness costs. By default twice that of the measured steps, because it grows during
            training (`planning.noise_scale.EXPECTED_GROWTH`); pass it if it is known.
        partition_bytes: largest message of weights; smaller messages spread a small model over
            several services and cross a slow link within `timeout_seconds`.
        verbose: 1 prints on the chief after each epoch how much of it the sync group trained.

    Raises:
        ValueError: for arguments out of range, data that cannot be shared (an unknown number of
            batches), or a missing secret.
        RuntimeError: by `fit`, for a `fit` of the same model within a callback, or steps on other
            data than the workers share.

    Reference:
        Kim et al., Cluster Computing 23, 2020 (all-reduce within, parameter server between); Jiang
        et al., "BytePS", OSDI 2020 (the rule "delta").
    """

    def __init__(
        self,
        rule: str | dict[str, Any] | UpdateRule = "delta",
        *,
        period: int | str | None = None,
        async_batch_size: int | None = None,
        max_staleness: int | None = None,
        on_service_loss: str = "raise",
        timeout_seconds: float = 10.0,
        startup_timeout_seconds: float = 300.0,
        shutdown_timeout_seconds: float = 60.0,
        communication_dtype: str | None = None,
        top_k_ratio: float | None = None,
        service_placement: str = "auto",
        partition_bytes: int = PARTITION_BYTES,
        roles: str = "tf_config",
        profile_steps: int = MEASURED_STEPS,
        noise_scale: float | None = None,
        verbose: int = 0,
    ) -> None:
        super().__init__()
        self._verbose = verbose
        self._steps_of_epoch = self._samples_of_epoch = 0
        steps = None if period == "auto" else period
        check_number("period", steps, least=1, whole=True, or_none=True, otherwise=' or "auto"')
        check_number("async_batch_size", async_batch_size, least=1, whole=True, or_none=True)
        check_number("max_staleness", max_staleness, least=0, whole=True, or_none=True)
        check_number("timeout_seconds", timeout_seconds, above=0)
        check_number("startup_timeout_seconds", startup_timeout_seconds, least=0)
        check_number("shutdown_timeout_seconds", shutdown_timeout_seconds, least=0)
        check_number("partition_bytes", partition_bytes, least=1, whole=True)
        check_number("profile_steps", profile_steps, least=1, most=CAPACITY, whole=True)
        check_number("noise_scale", noise_scale, above=0, or_none=True)
        check_verbose(verbose)
        check_one_of("on_service_loss", on_service_loss, ("raise", "continue"))
        check_one_of("service_placement", service_placement, ("auto", "sharded"))
        check_one_of("roles", roles, ("tf_config", "auto"))
        self._chooses_roles = roles == "auto"
        self._measured = profile_steps, noise_scale
        self._choice: RoleChoice | None = None
        self._rule = rule
        found = _asynchronous(rule, num_workers=2)
        period = _default_period(found) if period is None else period
        self._options = HybridOptions(
            rule=found,
            period=max(FIRST_PERIOD, found.least_period) if period == "auto" else int(period),
            adapts_period=period == "auto",
            async_batch_size=async_batch_size,
            max_staleness=max_staleness,
            timeout_seconds=timeout_seconds,
            startup_timeout_seconds=startup_timeout_seconds,
            shutdown_timeout_seconds=shutdown_timeout_seconds,
            goes_on_without_service=on_service_loss == "continue",
            wire=_wire(communication_dtype, top_k_ratio),
            spreads_service=service_placement == "sharded",
            partition_bytes=partition_bytes,
        )
        _check_options(self._options)
        self._participant: Participant | None = None
        self._user_optimizer: keras.optimizers.Optimizer | None = None
        self._fit: FitSession | None = None
        self._shorter_epochs = ShorterEpochs()
        self._begun_at: int | None = None  # the first step of the running execution
        self._samples = 0
        self._starts = self._begins_pass = False

    @property
    def samples_used(self) -> list[int] | None:
        """Samples of the epoch that each participant has trained on, the sync group first.

        None before training, without async workers, and on tasks that do not lead the service.
        """
        center = getattr(self._participant, "center", None)
        return None if center is None else center.ledger.used.tolist()

    def on_train_begin(self, logs: Mapping[str, float] | None = None) -> None:
        """Find this task's role; the service starts with the first epoch."""
        strategy = heterogeneous_strategy(self.model, self)
        if self._chooses_roles and self._measures_first(strategy):
            return
        if not strategy.num_async_workers:
            say_nothing_is_exchanged(self, strategy, "as TF_CONFIG has no job async")
            return
        config = config_of(strategy)
        num_workers = strategy.num_async_workers + config.has_sync_group
        rule = _asynchronous(self._rule, num_workers)
        _check_cluster(self._options, rule, config, num_workers)
        rule.check_optimizer(self.model.optimizer)
        if isinstance(rule, ElasticAveraging) and not rule.may_wait:
            # an async worker takes a period's steps while its exchange travels
            overlap = math.inf if self._options.adapts_period else self._options.period
            rule.check_overlap(self.model.optimizer, overlap)
        check_keeps_weights(self.model.optimizer, self)
        epochs = min(self.params.get("epochs") or LARGEST_EPOCH, LARGEST_EPOCH)
        self._options = dataclasses.replace(self._options, rule=rule, num_epochs=epochs)
        kind: type[Participant] = SyncGroup
        if strategy.is_async_worker:
            kind = AsyncWorker
        elif strategy.is_parameter_server:
            kind = ServiceTask
        self._participant = kind(self.model, strategy, self._options)
        _check_steps(self.params.get("steps"), self._participant.num_batches)
        self._participant.data.cut_again()
        _check_can_be_shared(self._participant.data)
        if self._options.rule.uses_gradients:
            self._send_gradients(self._participant)
        self._starts = True
        self._begins_pass = False
        strategy.extended.data_path.claim(self._participant.data, self._claims)
        self._fit = fit = self._required_session()
        fit.add_layer(Rank.COUNT_SAMPLES, self._count_samples)
        fit.before_inner(self._refuse_fit_within)
        fit.before_callbacks("on_epoch_end", self._end_epoch)
        fit.before_callbacks("on_train_end", self._end_training)
        fit.on_end(self._abandon)

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Open or connect to the service; restore the worker's own weights."""
        self._begun_at = None
        self._steps_of_epoch = self._samples_of_epoch = 0
        if self._participant is None:
            return
        self._shorter_epochs.expect()  # the others take part of each
        if self._starts:
            self._starts = False
            self._participant.forget_gradients()
        self._participant.hide_center()
        self._participant.start_epoch(epoch)

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Give the epoch's pass this task's batches; other passes over the same data take all."""
        is_first, self._begun_at = self._begun_at is None, batch
        if self._participant is None:
            return
        self._samples = 0
        if not is_first:
            return
        data = self._participant.data
        data.cut_again()  # others may have inspected its first element since
        _check_can_be_shared(data)
        self._participant.check_rate()  # others set it at the start or end of an epoch
        self._begins_pass = True

    def on_train_batch_end(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        steps = 1 + batch - (batch if self._begun_at is None else self._begun_at)
        if self._choice is not None:
            self._choose_roles(self._choice.steps_done(steps))
        if self._participant is None:
            return
        self._steps_of_epoch += steps
        self._samples_of_epoch += self._samples
        _check_trains_on(self._participant.data, self._samples)
        self._participant.steps_done(steps, self._samples)

    def on_test_begin(self, logs: Mapping[str, float] | None = None) -> None:
        if self._participant is not None:
            self._participant.show_center()

    def _end_epoch(self, epoch: int, logs: Mapping[str, float] | None) -> None:
        """Show the center to all callbacks."""
        self._shorter_epochs.end()
        if self._participant is None:
            return
        self._participant.show_center()
        who = "this worker" if isinstance(self._participant, AsyncWorker) else "the sync group"
        message = (
            f"Hybrid aggregation, epoch {epoch + 1}: {who} trained {self._samples_of_epoch} "
            f"samples in {self._steps_of_epoch} steps; the others trained the rest."
        )
        tell(message, heterogeneous_strategy(self.model, self), self._verbose)

    def on_train_end(self, logs: Mapping[str, float] | None = None) -> None:
        """Stop measuring for roles if that is still in progress."""
        choice, self._choice = self._choice, None
        if choice is not None:
            choice.end()

    def _end_training(self, logs: Mapping[str, float] | None = None) -> None:
        """Leave the center's weights in the model, visible to all callbacks."""
        if self._participant is None:
            return
        if self._starts:  # no epoch has begun: no connection, and no center
            self._participant.leave()
        else:
            self._participant.hide_center()
            self._participant.end()
        self._forget()

    def _count_samples(
        self, step: StepFunction, batches: Iterator[StepInput] | list[StepInput]
    ) -> object:
        """Count only the samples of steps: callbacks may predict on the training data."""
        if self._participant is None:
            return step(batches)
        data = self._participant.data
        before = data.samples_delivered
        result = step(batches)
        is_list = isinstance(batches, list)
        self._samples += (
            sum(map(_samples_in, batches)) if is_list else data.samples_delivered - before
        )
        return result

    def _refuse_fit_within(self, inner: FitSession) -> None:
        if inner.loop == "fit" and self._participant is not None:
            raise RuntimeError(
                "AsyncWorkers exchanges weights while the model trains, and steps on other "
                "data would be part of it. Received: a fit of the same model within a callback. "
                "Train another model there, such as keras.models.clone_model gives in the scope of "
                "a tf.distribute.OneDeviceStrategy, or call fit after that with AsyncWorkers "
                "has ended."
            )

    def _abandon(self) -> None:
        """Stop everything that runs alongside a failed training."""
        if self._participant is None:
            return
        try:
            self._participant.leave()
        finally:
            self._forget()

    def _forget(self) -> None:
        """Restore model and strategy to their original state."""
        self._shorter_epochs.end()
        strategy = heterogeneous_strategy(self.model, self)
        strategy.extended.data_path.claim(None, None)
        # A training without an epoch leaves its backup unused; the next one must not get it.
        strategy.extended.training_state.forget_center()
        if self._user_optimizer is not None:
            self.model.optimizer, self._user_optimizer = self._user_optimizer, None
            self.model.make_train_function(force=True)
        self._participant = None

    def _measures_first(self, strategy: HeterogeneousStrategy) -> bool:
        """Whether the roles are still to be chosen; report those already chosen."""
        chosen = os.environ.get(CHOSEN_ROLES)
        if chosen and strategy.is_chief:
            _logger.warning("Roles were chosen from measurements: %s", chosen)
        self._choice = None
        may_choose = strategy.extended.training_state.role_trials_left > 0 and not chosen
        may_choose = may_choose and strategy.num_workers > 1 and not strategy.num_async_workers
        if may_choose:
            strategy.extended.training_state.role_trials_left -= 1
            self._choice = RoleChoice(self.model, strategy, self._options, *self._measured)
        return may_choose

    def _choose_roles(self, plan: RolePlan | None) -> None:
        """Continue if all workers stay in the sync group; else restart all in their roles."""
        choice = self._choice
        if plan is None or choice is None:
            return
        self._choice = None
        strategy = heterogeneous_strategy(self.model, self)
        strategy.extended.training_state.role_trials_left = 0
        if strategy.is_chief:
            _logger.warning("Measured for roles: %s", plan)
        if any(role != "sync" for role in plan.roles):
            start_again(strategy, plan)
        choice.end()

    def _claims(self) -> Claims | None:
        """Return the claims of a new pass: all batches, unless it is the epoch's pass."""
        if self._fit is None or not self._fit.is_in_step:
            return None  # another callback evaluates before the first step
        begins, self._begins_pass = self._begins_pass, False
        return self._participant.claims() if begins and self._participant is not None else None

    def _send_gradients(self, participant: Participant) -> None:
        """Make steps sum gradients; the optimizer that updates weights is in the service."""
        self._user_optimizer = self.model.optimizer
        self.model.optimizer = participant.sum_gradients()
        self.model.make_train_function(force=True)


def _samples_in(batch: StepInput) -> int:
    sizes = find_sizes(batch)
    return 0 if sizes is None else int(sizes.numpy().sum())


def _asynchronous(rule: str | dict[str, Any] | UpdateRule, num_workers: int) -> UpdateRule:
    found = get(rule, num_workers=num_workers)
    if not isinstance(found, UpdateRule):
        raise ValueError(
            "AsyncWorkers needs a rule in which workers exchange with a center on their own. "
            f"Received: {found.name!r}, in which all exchange at once. Use LocalTraining for it, "
            "or one of delta, async_sgd, delay_compensated, async_easgd, async_measgd and "
            "hogwild_easgd."
        )
    return found


def _check_can_be_shared(data: GlobalOrderDataset) -> None:
    if data.was_looked_at:  # its first pass has begun, over all batches
        raise ValueError(
            "Workers share each pass over the data, which must start over for that. Received: "
            f"{data}, in which a shuffle() that reshuffles is below an operation that cannot be "
            "rebuilt, such as padded_batch, interleave, filter, cache or unbatch. Put shuffle() "
            "after it, or give it reshuffle_each_iteration=False."
        )


def _check_steps(steps: int | None, num_batches: int) -> None:
    if steps not in (None, num_batches):
        raise ValueError(
            "The workers share whole epochs of the data. Received: steps_per_epoch="
            f"{steps}, and data with {num_batches} batches. Leave steps_per_epoch out; "
            f"dataset.take({steps}) makes shorter epochs."
        )


def _check_trains_on(data: GlobalOrderDataset, samples: int) -> None:
    if not samples:
        raise RuntimeError(
            "A training step had no batch of the data that workers share. Received: steps on other "
            f"data than {data}, which was distributed last before `fit`. Give `fit` a "
            "tf.data.Dataset, or distribute what it trains on last."
        )


def _default_period(rule: UpdateRule) -> int | str:
    """Plan by times, unless the rule's settings assume a number of steps or workers wait."""
    counts_steps = rule.uses_gradients or rule.sends_weights
    return _PERIOD if counts_steps or rule.may_wait else "auto"


def _wire(communication_dtype: str | None, top_k_ratio: float | None) -> Wire:
    if top_k_ratio is None:
        types = ("float16", "bfloat16")
        check_one_of("communication_dtype", communication_dtype, (None, *types))
        return FloatWire(communication_dtype or "float32")
    check_number("top_k_ratio", top_k_ratio, above=0, most=1)
    expect(
        communication_dtype is None,
        "None with top_k_ratio",
        communication_dtype=communication_dtype,
    )
    return TopKWire(top_k_ratio)


def _check_options(options: HybridOptions) -> None:
    rule = options.rule
    if options.goes_on_without_service and rule.uses_gradients:
        raise ValueError(
            'on_service_loss="continue" needs a rule in which workers run their own optimizer: '
            f"they could not train without the service. Received: {rule.name!r}. Use "
            '"delta" or elastic averaging, or on_service_loss="raise".'
        )
    if options.adapts_period and rule.may_wait:
        raise ValueError(
            'period="auto" needs a rule in which workers do not wait for each other. Received: '
            f"{rule.name!r}. Give a number, such as planning.plan_pushes chooses."
        )
    if isinstance(options.wire, TopKWire) and rule.sends_weights:
        raise ValueError(
            f"With the rule {rule.name!r} workers send their weights, and what a top-k "
            "message leaves out would count as 0. Received: top_k_ratio. Leave it out, or use a "
            'rule that sends changes, such as "delta".'
        )


def _check_cluster(
    options: HybridOptions, rule: UpdateRule, config: ClusterConfig, num_workers: int
) -> None:
    if rule.may_wait and config.has_sync_group:
        raise ValueError(
            f"With the rule {rule.name!r} workers wait for each other, which would hold up the "
            "sync group. Received: a TF_CONFIG with a sync group. Make all workers async, with a "
            'task of the job "ps" that holds the parameter service.'
        )
    if options.spreads_service and not config.has_sync_group:
        raise ValueError(
            'service_placement="sharded" gives every member of the sync group a part of the '
            "service. Received: a TF_CONFIG without sync group, in which the tasks of the job ps "
            'hold it. Leave service_placement="auto".'
        )
    # a task that runs no script rebuilds the rule from its name and settings
    serving = config.parameter_services[0 if config.has_sync_group else 1 :]
    if serving and type(rule) not in RULES.values():
        raise ValueError(
            "`keras-het parameter-server` knows registered rules only. Received: the rule "
            f"{type(rule).__name__}, which is not, and {', '.join(serving)} of the job ps, which "
            "run no script. Decorate the rule with keras_het.rules.register_rule and start them "
            "with --import MODULE; or leave them out of TF_CONFIG: then the leader of the sync "
            'group holds the service, or all of the group with service_placement="sharded"; async '
            "workers alone keep one task ps, which runs the script."
        )
    # a rule made for another cluster: its workers would share their state
    made_for = rule.get_config().get("num_workers")
    if made_for not in (None, num_workers):
        raise ValueError(
            f"The rule {rule.name!r} was made for {made_for} workers. Received: a TF_CONFIG with "
            f"{num_workers} (the sync group is one of them). Give the rule that number."
        )
