"""The parameter service of async workers without a sync group, on a separate task."""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING

import keras

from keras_het.asynchronous.exchange.center import Center, join_service
from keras_het.asynchronous.exchange.claims import Grant, GroupClaims
from keras_het.asynchronous.exchange.participant import HybridOptions, Participant
from keras_het.asynchronous.parameter_service.sample_ledger import Presence, Stage
from keras_het.exchange.message import Vector

if TYPE_CHECKING:
    from keras_het.strategy.heterogeneous_strategy import HeterogeneousStrategy

_logger = logging.getLogger(__name__)
_POLL_SECONDS = 0.05


class ServiceTask(Participant):
    """A task that runs the same script as the workers but serves instead of training."""

    # `fit` lasts until each async worker that ever connected has ended, or was silent for
    # `shutdown_timeout_seconds`. An epoch begins when all batches of the last one are handed out.

    def __init__(
        self, model: keras.Model, strategy: HeterogeneousStrategy, options: HybridOptions
    ) -> None:
        super().__init__(model, strategy, options)
        self.center: Center | None = None
        self._service = contextlib.ExitStack()
        self._epoch = 0
        self._came: set[int] = set()
        self._passed_over: set[int] = set()

    def start_epoch(self, epoch: int) -> None:
        """Serve until training has ended; Keras then runs one epoch without a step."""
        if self.center is not None:
            return
        self._epoch = epoch
        self.center = join_service(self, self._service)
        if self.center is None:
            return
        self.center.start_epoch(epoch)
        while not self._all_have_ended(self.center):
            if self.center.ledger.is_handed_out(self._epoch):
                self._epoch += 1
                self.center.start_epoch(self._epoch)
            if self.rule.may_wait:
                self._pass_over_the_gone(self.center)
            time.sleep(_POLL_SECONDS)
        self.model.stop_training = True

    def _pass_over_the_gone(self, center: Center) -> None:
        """End all waiting for the turn of a worker that took batches and is now silent."""
        here, ended = {*center.training_workers()}, {*center.waiting_workers()}
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
        center = self.center.weights() if self.center is not None else self.vectors.weights.read()
        self.vectors.weights.write(center)
        if self.center is not None and self.vectors.state is not None:
            self.vectors.state.write(self.center.state())
        return center

    def end(self) -> None:
        """Give the final weights to the waiting workers and to the model."""
        center = self.center
        if center is None:
            return
        center.set_stage(Stage.CLOSED)
        deadline = time.monotonic() + self.options.shutdown_timeout_seconds
        while center.waiting_workers() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        self.meet_center()
        center.conclude()
        self.leave()

    def leave(self) -> None:
        self._service.close()

    def _all_have_ended(self, center: Center) -> bool:
        """Whether every worker that connected has reported its end; a silent one may come back."""
        came = center.ledger.claimed.sum() > 0
        patience = max(self.options.presence_seconds, self.options.shutdown_timeout_seconds)
        return bool(came and not center.ledger.present(Presence.TRAINING, patience))
