"""The parameter service inside its leader's process."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from keras_het.asynchronous.center.center import Center, Grant
from keras_het.asynchronous.center.hosted_parts import HostedParts
from keras_het.asynchronous.center.service_connection import outgoing
from keras_het.asynchronous.center.service_spec import spec_of
from keras_het.asynchronous.parameter_service.sample_ledger import Presence, Stage
from keras_het.asynchronous.rules import Signal

_logger = logging.getLogger("keras_het")
_GROUP = 0


class LocalCenter(Center):
    """Center, moving statistics and sample ledger, used in memory and served on one server.

    Args:
        leader: participant whose current weights become the center.
        address: "host:port" to listen on.
        secret: secret shared by all tasks.
    """

    def __init__(self, leader: Any, address: str, secret: bytes) -> None:
        self._leader, vectors = leader, leader.vectors
        self._rule, self._state_rule = leader.rule, leader.state_rule
        self._presence_seconds = leader.options.presence_seconds
        self._parts = HostedParts(
            address, 0, spec_of(leader, 1), secret, (leader.rule, leader.state_rule)
        )
        self._weights, self._state = self._parts.weights, self._parts.state
        self.ledger = self._parts.ledger
        self._weights.set_partitions(vectors.weights.read())
        if not leader.rule.may_wait:
            self._weights.prepare_local_exchange()
        if self._state is not None:
            self._state.set_partitions(vectors.state.read())
        if leader.strategy._training_state.restored is not None:
            self._weights.set_state(leader.strategy._training_state.restored)
            leader.strategy._training_state.restored = None
        leader.strategy._training_state.export = self._weights.state
        self._seen = vectors.weights.read()
        self._parts.start()
        _logger.info("The parameter service answers on %s.", address)

    def start_epoch(self, epoch: int) -> None:
        """Begin an epoch."""
        self.ledger.start_epoch(epoch, self._leader.facts)
        self.ledger.set_stage(Stage.RUNNING)
        self._parts.tell_addresses([self._parts.address])

    def set_stage(self, stage: Stage) -> None:
        """Announce the stage to all async workers; in the last stage they change nothing."""
        if stage == Stage.CLOSED:
            for service in (self._weights, self._state):
                if service is not None:
                    service.close_training()
        self.ledger.set_stage(stage)

    def exchange(
        self, weights: list[Any], state: list[Any], samples: int, push: bool, wait: bool = False
    ) -> list[Any]:
        """Exchange in memory, without any wait."""
        del wait
        new_state = []
        if self._state is not None:
            answers = self._state.exchange_locally(_GROUP, samples, state)
            new_state = [
                self._state_rule.receive(own, own, answer)
                for own, answer in zip(state, answers, strict=True)
            ]
        if not push:
            return [*weights, *new_state]
        messages, goes_on = outgoing(self._rule, weights, self._seen)
        self._seen = self._weights.exchange_locally(_GROUP, samples, messages)
        new = [self._rule.receive(w, w, a) for w, a in zip(goes_on, self._seen, strict=True)]
        return [*new, *new_state]

    def claim(self, epoch: int, count: int) -> Grant:
        """Claim batches of an epoch for the group."""
        first, granted = self.ledger.claim(_GROUP, epoch, count)
        return Grant(first, granted, granted < count)

    def add_used(self, samples: int) -> None:
        """Count samples that the group has used."""
        self.ledger.add_used(_GROUP, samples)

    def pace(self, pace: Sequence[float]) -> tuple[Any, Any] | None:
        """Report the group's pace and return the pace of all clients."""
        return self.ledger.pace(_GROUP, pace)

    def weights(self) -> list[Any]:
        """The center, one vector for each partition."""
        return self._weights.center_partitions()

    def state(self) -> list[Any]:
        """The center of the moving statistics, in the same form."""
        return self._state.center_partitions() if self._state is not None else []

    def versions(self) -> Any:
        """Number of updates of each partition of the weights."""
        return self._weights.versions()

    def training_clients(self) -> list[int]:
        """Async workers that are training."""
        return self.ledger.present(Presence.TRAINING, self._presence_seconds)

    def waiting_clients(self) -> list[int]:
        """Async workers that have finished and wait for the final weights."""
        return self.ledger.present(Presence.WAITING, self._presence_seconds)

    def skip(self, client: int) -> bool:
        """Stop all waiting for a client that is gone."""
        self._weights.signal_locally(client, Signal.LEAVE)
        return True

    def conclude(self) -> None:
        """Do nothing: counts stay readable here in any case."""

    def close(self) -> None:
        """Stop answering."""
        self._parts.close()
