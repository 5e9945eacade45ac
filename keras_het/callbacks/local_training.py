"""Workers that train independently and exchange periodically, all at once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from keras_het.fit.model_strategy import (
    check_keeps_weights,
    heterogeneous_strategy,
    say_nothing_is_exchanged,
    tell,
)
from keras_het.local_training import (
    LocalSteps,
    PeriodicExchange,
    adopt_variables_of_the_chief,
    balanced_shares,
)
from keras_het.planning.argument_checks import check_flag, check_number, check_verbose
from keras_het.rules import SynchronousRule, get
from keras_het.stability import experimental
from keras_het.strategy.keras_calls import SessionCallback

if TYPE_CHECKING:
    from keras_het.strategy.heterogeneous_strategy import HeterogeneousStrategy


@experimental
class LocalTraining(SessionCallback):
    r"""Local steps without a collective between workers, and an exchange every few steps.

    Each worker trains on its own share of each global batch, with its own optimizer. Its replicas
    are reduced exactly, as without this callback: with :math:`b_r` samples of replica r,
    :math:`g_i = \sum_{r \in i} b_r g_r / \sum_{r \in i} b_r`. Every `period` steps of the rule, all
    workers sum one packed vector and combine it with the *center* weights; for "diloco",

    .. math:: D = \frac{\sum_i n_i (c - x_i)}{\sum_i n_i}, \qquad u \leftarrow \mu u + D, \qquad
              c \leftarrow c - \eta (D + \mu u), \qquad x_i \leftarrow c.

    With the rule's `overlap`, the sum travels while the next steps are computed. All workers wait
    at an exchange for the slowest: give them shares in proportion to their speed, or let `balance`
    do it.

    An epoch whose last step is not one of them ends with another exchange, so that its validation,
    checkpoints and other callbacks see a center that has all its steps. Epoch logs cover all
    workers; step logs cover each worker separately. One worker alone trains as without this
    callback. `docs/guides/local_training.md` has the details.

    Args:
        rule: name, dict or instance of a `keras_het.rules.SynchronousRule`:
            "sync_easgd" or "diloco". A name has the rule's defaults; for other settings give the
            rule, such as `DiLoCo(overlap=5)`.
        period: local steps from one exchange to the next, with a rule's name. Default: the rule's,
            or the steps of an epoch if these are fewer.
        balance: whether the shares follow the speeds of the workers, measured from one exchange to
            the next, so that none waits for the slowest.
        verbose: 1 prints on the chief after each epoch how often workers exchanged, and new shares.

    Raises:
        TypeError: for a period in addition to a rule object.
        ValueError: for a rule that is not synchronous, a period longer than the training, a
            cluster with async workers, or use together with `BatchBalancer`.

    Reference:
        You, Buluc and Demmel, SC 2017 (Sync EASGD); Douillard et al., 2023 (DiLoCo).
    """

    def __init__(
        self,
        rule: str | dict[str, Any] | SynchronousRule = "diloco",
        *,
        period: int | None = None,
        balance: bool = False,
        verbose: int = 0,
    ) -> None:
        super().__init__()
        check_number("period", period, least=1, whole=True, or_none=True)
        check_flag("balance", balance)
        check_verbose(verbose)
        if period is not None and not isinstance(rule, str):
            raise TypeError(
                "A rule that is not given by its name brings its own period. Received: "
                f"period={period} and {rule!r}. Give the period to the rule."
            )
        config = {"class_name": rule, "config": {"period": period}}
        self._rule = rule if period is None else config
        self._balance, self._verbose = balance, verbose
        _synchronous(self._rule, num_workers=2)
        self._exchange: PeriodicExchange | None = None
        self._steps: LocalSteps | None = None
        self._begun_at = 0  # the first step of the running execution
        self._samples_of_epoch = 0

    def on_train_begin(self, logs: Mapping[str, float] | None = None) -> None:
        """Make the training steps local; exchanges start with the first epoch."""
        strategy = heterogeneous_strategy(self.model, self)
        _check_cluster(strategy)
        self._exchange = self._steps = None
        if strategy.num_workers == 1:
            return say_nothing_is_exchanged(self, strategy, "as it has one worker")
        rule = _synchronous(self._rule, strategy.num_workers)
        rule = _fitting(rule, self._rule, self.params.get("steps"), self.params["epochs"])
        _check_num_workers(rule, strategy.num_workers)
        rule.check_optimizer(self.model.optimizer)
        check_keeps_weights(self.model.optimizer, self)
        self._rule_of_training = rule
        fit = self._required_session()
        self._steps = LocalSteps(fit, strategy)
        fit.before_callbacks("on_epoch_end", self._end_epoch)
        fit.before_callbacks("on_train_end", self._end_training)

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Restore the worker's own weights."""
        if self._steps is None:
            return
        exchange = self._exchange or self._start(heterogeneous_strategy(self.model, self))
        exchange.hide_center()
        exchange.pace.leave_out()
        self._samples_of_epoch = 0
        self._steps.take_samples()

    def _start(self, strategy: HeterogeneousStrategy) -> PeriodicExchange:
        """Start from the current weights, which a backup may have restored in the meantime."""
        state, rule = strategy.extended.training_state, self._rule_of_training
        self._exchange = exchange = PeriodicExchange(self.model, strategy, rule)
        if state.restored is not None:
            exchange.restore(state.restored)
            state.restored = None
        state.export = exchange.saved
        return exchange

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        self._begun_at = batch

    def on_train_batch_end(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        if self._exchange is None or self._steps is None:
            return
        in_epoch = self.params.get("steps")
        if in_epoch is not None:  # Keras counts the last execution in full
            batch = min(batch, in_epoch - 1)
        steps = batch - self._begun_at + 1
        samples = self._steps.take_samples()
        self._samples_of_epoch += samples
        self._exchange.steps_done(steps, samples)
        if self._balance and (paces := self._exchange.take_paces()) is not None:
            self._use_shares(*paces)
        if in_epoch is None or batch + 1 == in_epoch:
            # Keras reads the metrics of all workers next, and collectives must run one after
            # another. If the number of steps is unknown, this can happen after any step.
            self._exchange.wait()

    def _use_shares(self, samples: list[float], seconds: list[float]) -> None:
        """Give each worker a share by its speed; the same on all workers, between two steps."""
        strategy = heterogeneous_strategy(self.model, self)
        layout = strategy.layout
        replicas = [layout.replicas_of(worker) for worker in range(layout.num_workers)]
        own = [math.fsum(strategy.share_weights[each.start : each.stop]) for each in replicas]
        wanted = balanced_shares(samples, seconds, own)
        if wanted is None:
            return
        strategy.set_share_weights(
            [
                strategy.share_weights[replica] * (new / old if old else 0.0)
                for each, old, new in zip(replicas, own, wanted, strict=True)
                for replica in each
            ]
        )
        parts = ", ".join(f"{100 * each / math.fsum(wanted):.1f} %" for each in wanted)
        tell(f"Local training: the workers' shares are {parts}.", strategy, self._verbose)

    def on_test_begin(self, logs: Mapping[str, float] | None = None) -> None:
        """Validate what all steps of the epoch have led to."""
        if self._exchange is not None:
            self._exchange.exchange_remaining()
            self._exchange.show_center()

    def _end_epoch(self, epoch: int, logs: dict[str, float] | None) -> None:
        """Show the center and the logs of all workers to all callbacks."""
        if self._exchange is None:
            return
        self._exchange.exchange_remaining()
        self._exchange.show_center()
        strategy = heterogeneous_strategy(self.model, self)
        _combine_logs(strategy, logs or {}, self._samples_of_epoch)
        count = self._exchange.num_exchanges
        name = self._rule_of_training.name
        tell(f"Local training, {name}: {count} exchanges so far.", strategy, self._verbose)

    def _end_training(self, logs: Mapping[str, float] | None = None) -> None:
        """Leave the same model on all workers: the center, and the chief's optimizer state."""
        strategy = heterogeneous_strategy(self.model, self)
        if self._exchange is not None:
            self._exchange.end()
            adopt_variables_of_the_chief(self.model, strategy)
        if self._steps is not None:
            self._steps.leave()
        # A training without an epoch leaves its backup unused; the next one must not get it.
        strategy.extended.training_state.forget_center()
        self._exchange = self._steps = None


def _combine_logs(strategy: HeterogeneousStrategy, logs: dict[str, float], samples: int) -> None:
    """Average logs of a custom train step over samples; logs of metrics agree already."""
    names = sorted(name for name, value in logs.items() if np.ndim(value) == 0)
    own = np.array([[float(logs[name]) for name in names] + [samples]], np.float64)
    rows = strategy.extended.gather_over_workers(own)
    if len(np.unique(rows[:, :-1], axis=0)) == 1:
        return
    for name, value in zip(names, np.average(rows, axis=0, weights=rows[:, -1]), strict=False):
        logs[name] = float(value)


def _synchronous(rule: str | dict[str, Any] | SynchronousRule, num_workers: int) -> SynchronousRule:
    found = get(rule, num_workers=num_workers)
    if not isinstance(found, SynchronousRule):
        raise ValueError(
            "LocalTraining needs a rule by which all workers exchange at once. Received: "
            f"{found.name!r}. Use diloco or sync_easgd here, and "
            "keras_het.callbacks.AsyncWorkers with workers of the job `async` for the others."
        )
    return found


def _fitting(
    rule: SynchronousRule,
    given: str | dict[str, Any] | SynchronousRule,
    steps: int | None,
    epochs: int,
) -> SynchronousRule:
    """Return the rule, by default with a period that is no longer than an epoch."""
    config = given.get("config") or {} if isinstance(given, dict) else {}
    is_chosen = isinstance(given, SynchronousRule) or "period" in config
    if not is_chosen and steps and steps < rule.period:
        period = max(steps, rule.overlap, 1)
        rule = type(rule)(**{**rule.get_config(), "period": period})
    if is_chosen and steps and rule.period > steps * epochs:
        raise ValueError(
            f"Workers would not exchange within this training. Received: period={rule.period}; "
            f"expected: at most {steps * epochs}, the steps of {epochs} epochs of {steps}. Give a "
            "shorter period, or none: the default fits the epochs."
        )
    return rule


def _check_cluster(strategy: HeterogeneousStrategy) -> None:
    if strategy.num_async_workers:
        raise ValueError(
            "Workers of the job `async` exchange with a parameter service, not with each other. "
            f"Received: a cluster with {strategy.num_async_workers} of them. Use "
            "keras_het.callbacks.AsyncWorkers, or start all as `worker`."
        )


def _check_num_workers(rule: SynchronousRule, num_workers: int) -> None:
    own = getattr(rule, "num_workers", num_workers)
    if own != num_workers:
        raise ValueError(
            f"The rule {rule.name} is made for another number of workers. Received: num_workers="
            f"{own}; the cluster has {num_workers}. Give the rule's name, or that number."
        )
