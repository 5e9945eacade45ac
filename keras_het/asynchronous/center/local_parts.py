"""The parameter service inside its leader's process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np

from keras_het.asynchronous.center.hosted_parts import HostedParts
from keras_het.asynchronous.center.service_spec import spec_of
from keras_het.asynchronous.exchange.participant import Participant
from keras_het.asynchronous.parameter_service.local_transport import LocalTransport
from keras_het.asynchronous.parameter_service.sample_ledger import LEADER, SampleLedger


class LocalParts:
    """All parts of the service, used in memory and served on one server."""

    answers_at_once = True
    awaits_center = False

    def __init__(self, leader: Participant, address: str) -> None:
        self._leader, self.addresses = leader, [address]
        rules = leader.rule, leader.state_rule
        self._hosted = HostedParts(address, 0, spec_of(leader, 1), leader.secret, rules)
        self._weights, self._state = self._hosted.weights, self._hosted.state
        self.ledger = cast(SampleLedger, self._hosted.ledger)
        self.weights = LocalTransport(self._weights, LEADER)
        self.state = None if self._state is None else LocalTransport(self._state, LEADER)

    def bring_center(self, saved: Mapping[str, np.ndarray] | None = None) -> None:
        """Make the leader's current weights and moving statistics the center; start answering."""
        vectors = self._leader.vectors
        self._weights.set_partitions(vectors.weights.read())
        if not self._leader.rule.may_wait:
            self._weights.prepare_local_exchange()
        if self._state is not None and vectors.state is not None:
            self._state.set_partitions(vectors.state.read())
        if saved is not None:
            self._weights.set_state(saved)
        self._hosted.start()

    def exported(self) -> dict[str, np.ndarray]:
        """Return versions and rule state, as arrays that a backup can keep."""
        return self._weights.state()

    def restarted(self) -> list[str]:
        """Return nothing: this process is the service."""
        return []

    def begin_again(self, restarted: Sequence[str]) -> None:
        """Do nothing: this process is the service."""

    def open_directory(self) -> None:
        """Admit async workers."""
        self._hosted.tell_addresses(self.addresses)

    def close_training(self) -> None:
        """Make the service reject further pushes."""
        for service in (self._weights, self._state):
            if service is not None:
                service.close_training()

    def close(self, timeout_seconds: float | None = None) -> None:
        """Stop answering."""
        del timeout_seconds
        self._hosted.close()
