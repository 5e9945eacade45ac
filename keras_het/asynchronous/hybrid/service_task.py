"""The parameter service of async workers that have no sync group, on a task of its own."""

from __future__ import annotations

import logging
import time
from typing import Any

from keras_het.asynchronous.center.host import Grant, Host
from keras_het.asynchronous.center.open_service import Membership, join_service
from keras_het.asynchronous.exchange.participant import HybridOptions, Participant
from keras_het.asynchronous.hybrid.claims import GroupClaims
from keras_het.asynchronous.parameter_service.sample_ledger import Presence, Stage
from keras_het.training_strategy import TrainingStrategy

_logger = logging.getLogger("keras_het")
_POLL_SECONDS = 0.05


class ServiceTask(Participant):
    """Runs the same script as the workers, and serves where they train.

    Its `fit` lasts as long as theirs, takes no batch, and leaves it with the center's weights, to
    be evaluated and saved. An epoch begins when the batches of the one before are handed out.
    Training ends when every async worker that came has ended, or was not heard of for
    `end_seconds`.

    Args:
        model: the model, whose weights are the first center.
        strategy: its `HeterogeneousStrategy`.
        options: the same on all tasks.
    """

    def __init__(self, model: Any, strategy: TrainingStrategy, options: HybridOptions) -> None:
        super().__init__(model, strategy, options)
        self.host: Host | None = None
        self._membership = Membership()
        self._epoch = 0
        self._came: set[int] = set()
        self._passed_over: set[int] = set()

    def start_epoch(self, epoch: int) -> None:
        """Serves until training has ended; Keras then runs one epoch without a step."""
        if self.host is not None:
            return
        self._epoch = epoch
        self._membership = join_service(self)
        self.host = self._membership.host
        if self.host is None:
            return
        self.host.start_epoch(epoch)
        while not self._all_have_ended(self.host):
            if self.host.ledger.is_handed_out(self._epoch):
                self._epoch += 1
                self.host.start_epoch(self._epoch)
            if self.rule.may_wait:
                self._pass_over_the_gone(self.host)
            time.sleep(_POLL_SECONDS)
        self.model.stop_training = True

    def _pass_over_the_gone(self, host: Host) -> None:
        """Lets nobody wait for the turn of a worker that took batches and is silent now."""
        here, ended = {*host.training_clients()}, {*host.waiting_clients()}
        self._came |= here | ended | {int(client) for client in host.ledger.claimed.nonzero()[0]}
        # what a worker says at its end may not have come: nobody waits for one that has ended
        gone = self._came - here
        self._passed_over &= gone  # who is here again may go again
        for client in gone - self._passed_over:
            if host.pass_over(client):
                self._passed_over.add(client)
                if client not in ended:
                    _logger.warning(
                        "Async worker %d is gone; the others do not wait for it.", client
                    )

    def claims(self) -> GroupClaims:
        """No batch is this task's."""
        claims = GroupClaims(self.passes_before(self._epoch))
        claims.add(Grant(0, 0, True))
        return claims

    def steps_done(self, steps: int, samples: int) -> None:
        """Nothing is trained here."""

    def meet_center(self) -> list[Any]:
        """The center, which the model gets."""
        center = self.host.center() if self.host is not None else self.vectors.weights.read()
        self.vectors.weights.write(center)
        if self.host is not None and self.vectors.state is not None:
            self.vectors.state.write(self.host.state_center())
        return center

    def end(self) -> None:
        """Gives the final weights to the workers that wait for them, and to the model."""
        host = self.host
        if host is None:
            return
        host.set_stage(Stage.CLOSED)
        deadline = time.monotonic() + self.options.end_seconds
        while host.waiting_clients() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        self.meet_center()
        host.conclude()
        self.leave()

    def leave(self) -> None:
        """Ends the service."""
        membership, self._membership = self._membership, Membership()
        membership.close()

    def _all_have_ended(self, host: Host) -> bool:
        """Whether every worker that came has said so; one that is silent may come back."""
        came = host.ledger.claimed.sum() > 0
        patience = max(self.options.presence_seconds, self.options.end_seconds)
        return bool(came and not host.ledger.present(Presence.TRAINING, patience))
