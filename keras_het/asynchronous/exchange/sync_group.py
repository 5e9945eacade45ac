"""Who leads the parameter service: a sync group's first worker, or a task without a group."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import keras
import numpy as np
import tensorflow as tf

from keras_het.asynchronous.exchange.center import Center, join_service
from keras_het.asynchronous.exchange.claims import Grant, GroupClaims
from keras_het.asynchronous.exchange.participant import (
    HybridOptions,
    Participant,
)
from keras_het.asynchronous.parameter_service.sample_ledger import Presence, Stage
from keras_het.exchange.message import Vector

if TYPE_CHECKING:
    from keras_het.strategy.heterogeneous_strategy import HeterogeneousStrategy


_logger = logging.getLogger(__name__)
_POLL_SECONDS = 0.02
_TO_FETCH = "to fetch the final weights"


class Leader(Participant):
    """A participant that may lead the service, or hold a part of it."""

    center: Center | None = None  # of who leads
    _service: contextlib.ExitStack | None = None
    _epoch = 0

    def _join(self) -> None:
        self._service = contextlib.ExitStack()
        self.center = join_service(self, self._service)

    def leave(self) -> None:
        """End the service: async workers learn that they have no leader."""
        if self._service is not None:
            self._service.close()

    def _wait_until(self, is_done: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + self.options.shutdown_timeout_seconds
        while not is_done() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        if not is_done():
            _logger.warning(
                "Async workers were given %g s %s; continuing without those that did not.",
                self.options.shutdown_timeout_seconds,
                what,
            )


class SyncGroup(Leader):
    """A group that trains synchronously; its leader exchanges every `period` steps."""

    # One collective passes result and batches to the other members, which add zeros: all have the
    # same bits. Hidden behind the next step an exchange slowed it as much, with staler weights.

    _claims: GroupClaims | None

    def __init__(
        self, model: keras.Model, strategy: HeterogeneousStrategy, options: HybridOptions
    ) -> None:
        super().__init__(model, strategy, options)
        self._num_known = 0  # batches of the group not used yet
        self._counted = 0  # number of samples that the ledger knows
        self._sum = tf.function(strategy.extended.sum_over_workers, autograph=False)
        self.period = options.period

    def start_epoch(self, epoch: int) -> None:
        """Open the service before the first epoch, and claim the first batches of this one."""
        if self._service is None:
            self._join()
        if self.center is not None:
            self.center.start_epoch(epoch)
        self._epoch = epoch
        self._claims = GroupClaims(self.passes_before(epoch))
        self._num_known = 0
        self._exchange(push=False)

    def steps_done(self, steps: int, samples: int) -> None:
        self._pace.computed(steps, samples)
        self._steps += steps
        self._num_known -= steps
        self._samples += samples
        if self._steps >= self.period:
            self.check_rate()
            with self._pace.exchanging():
                self._exchange(push=True)

    def meet_center(self) -> list[Vector]:
        """Exchange now; gradients still being accumulated stay in place."""
        self._exchange(push=self._steps > 0 and not self.rule.uses_gradients, wait=True)
        return self._agreed()[: self.vectors.num_weights]

    def end(self) -> None:
        """Wait for the async workers that are present; all end with the center's weights."""
        if self._steps:  # partial gradients too, which are final now
            self._exchange(push=True, wait=True)
        self.meet_center()
        center = self.center
        if center is not None:
            center.set_stage(Stage.ENDING)
            self._wait_until(
                lambda: not center.present(Presence.TRAINING), "to send their last changes"
            )
            center.set_stage(Stage.CLOSED)
        self.vectors.write(self._agreed())
        if center is not None:
            # One that ends first trains, then waits.
            self._wait_until(
                lambda: not any(map(center.present, (Presence.TRAINING, Presence.WAITING))),
                _TO_FETCH,
            )
            center.conclude()
        # Members hold parts until the last worker has fetched them.
        self._sum_over_members([np.zeros(1, np.float32)])
        self.leave()

    def _exchange(self, push: bool, wait: bool = False) -> None:
        """Exchange with the center, and claim the batches until after the next exchange."""
        claims = None if self._claims is None or self._claims.is_exhausted else self._claims
        header = [0, 0, 0, 0, 0]
        if self.center is not None:
            own = self.vectors.read(self.progress() if push else None)
            own = self.center.exchange(own, self._samples, push, wait)
            if claims is not None:
                period = self._next_period()
                grant = self._claim(self.center, period)
                header = [period, *grant.to_numbers()]
            self.center.add_used(self._samples - self._counted)
        else:  # what the leader has
            if push:
                self.forget_gradients()
            own = self._zeros()
        *values, agreed = self._sum_over_members([*own, np.array(header, np.float32)])
        self._counted = self._samples
        if push or not self.rule.uses_gradients:  # gradients may be half accumulated
            self._steps = self._samples = self._counted = 0
        self.vectors.write(values)
        if claims is not None:
            period, *numbers = agreed.tolist()
            self.period, grant = int(period), Grant.from_numbers(numbers)
            claims.add(grant)
            self._num_known += grant.count

    def _claim(self, center: Center, period: int) -> Grant:
        """Claim batches for `period` steps, and those by which the next exchange may be late."""
        # Keras calls back after whole executions, in which the group cannot wait for batches.
        wanted = period + max(period, int(self.model.steps_per_execution)) - self._num_known
        return center.claim(self._epoch, wanted) if wanted > 0 else Grant(0, 0, False)

    def _next_period(self) -> int:
        pace, center = self._pace.pace, self.center
        may_ask = (self.options.adapts_period or self.shows_paces) and self._pace.is_due
        found = center.pace(pace) if may_ask and pace is not None and center is not None else None
        if found is None:
            return self.period
        self.paces = found[0]
        adapts = self.options.adapts_period
        return self.period_for(*found, 0, self.num_batches) if adapts else self.period

    def _agreed(self) -> list[Vector]:
        """Return what the leader reads of the center, on all members."""
        return self._sum_over_members(self._zeros() if self.center is None else self.center.read())

    def _zeros(self) -> list[Vector]:
        return [np.zeros(size, np.float32) for size in self.vectors.sizes]

    def _sum_over_members(self, values: list[Vector]) -> list[Vector]:
        if self.strategy.num_workers == 1:
            return values
        total = self._sum(tf.constant(np.concatenate(values)))
        return np.split(total.numpy(), np.cumsum([len(value) for value in values])[:-1])


class ServiceTask(Leader):
    """A task that runs the same script as the workers but serves instead of training."""

    # `fit` lasts until each async worker that ever connected has ended, or was silent for
    # `shutdown_timeout_seconds`. An epoch begins when all batches of the last one are handed out.

    def __init__(
        self, model: keras.Model, strategy: HeterogeneousStrategy, options: HybridOptions
    ) -> None:
        super().__init__(model, strategy, options)
        self._came: set[int] = set()
        self._passed_over: set[int] = set()

    def start_epoch(self, epoch: int) -> None:
        """Serve until training has ended; Keras then runs one epoch without a step."""
        if self.center is not None:
            return
        self._epoch = epoch
        self._join()
        if self.center is None:
            return
        self.center.start_epoch(epoch)
        while not self._all_have_ended(self.center):
            if self.center.ledger.is_handed_out:
                self._epoch += 1
                self.center.start_epoch(self._epoch)
            if self.rule.may_wait:
                self._pass_over_the_gone(self.center)
            time.sleep(_POLL_SECONDS)
        self.model.stop_training = True

    def _pass_over_the_gone(self, center: Center) -> None:
        """End all waiting for the turn of a worker that took batches and is now silent."""
        here, ended = map(set, map(center.present, (Presence.TRAINING, Presence.WAITING)))
        self._came |= here | ended | {int(worker) for worker in center.ledger.claimed.nonzero()[0]}
        # A worker's farewell may be lost: nothing must wait for one that has ended.
        gone = self._came - here
        self._passed_over &= gone  # a returned worker may go again
        for worker in gone - self._passed_over:
            if center.skip(worker):
                self._passed_over.add(worker)
                if worker not in ended:
                    _logger.warning(
                        "Async worker %d is gone; the others do not wait for it.", worker
                    )

    def claims(self) -> GroupClaims:
        claims = GroupClaims(self.passes_before(self._epoch))
        claims.add(Grant(0, 0, True))
        return claims

    def steps_done(self, steps: int, samples: int) -> None:
        """Do nothing: this task trains nothing."""

    def meet_center(self) -> list[Vector]:
        if self.center is not None:
            self.vectors.write(self.center.read())
        return self.vectors.weights.read()

    def end(self) -> None:
        """Give the final weights to the waiting workers and to the model."""
        center = self.center
        if center is None:
            return
        center.set_stage(Stage.CLOSED)
        self._wait_until(lambda: not center.present(Presence.WAITING), _TO_FETCH)
        self.meet_center()
        center.conclude()
        self.leave()

    def _all_have_ended(self, center: Center) -> bool:
        """Whether every worker that connected has reported its end; a silent one may come back."""
        came = center.ledger.claimed.sum() > 0
        patience = max(self.options.presence_seconds, self.options.shutdown_timeout_seconds)
        return bool(came and not center.ledger.present(Presence.TRAINING, patience))
