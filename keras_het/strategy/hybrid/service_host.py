"""The parameter service inside the sync group's leader."""

from __future__ import annotations

import logging
from typing import Any

from keras_het import private_api
from keras_het.strategy.hybrid.participant import STATE_PREFIX, WEIGHTS_PREFIX
from keras_het.strategy.parameter_service import ParameterService
from keras_het.strategy.parameter_service.gate import Gate
from keras_het.strategy.parameter_service.sample_ledger import Presence, SampleLedger

_logger = logging.getLogger("keras_het")
_GROUP = 0


class ServiceHost:
    """Center, moving statistics and sample ledger, answering on one server.

    Args:
        group: the sync group, whose present weights become the center.
    """

    def __init__(self, group: Any) -> None:
        options, vectors = group.options, group.vectors
        address = group.strategy.cluster_config.service_address()
        self._rule, self._state_rule = group.rule, group.state_rule
        self._within_seconds = 3 * options.timeout_seconds
        server = private_api.RpcServer(address)
        self._weights = ParameterService(
            address,
            vectors.weights.partitions,
            group.rule,
            group.credential,
            group.num_clients,
            wire=options.weights_wire,
            staleness_bound=options.staleness_bound,
            prefix=WEIGHTS_PREFIX,
            server=server,
        )
        self._weights.set_partitions(vectors.weights.read())
        self._state: ParameterService | None = None
        if vectors.state is not None:
            self._state = ParameterService(
                address,
                vectors.state.partitions,
                group.state_rule,
                group.credential,
                group.num_clients,
                prefix=STATE_PREFIX,
                server=server,
            )
            self._state.set_partitions(vectors.state.read())
        if group.strategy.restored_service_state is not None:
            self._weights.set_state(group.strategy.restored_service_state)
            group.strategy.restored_service_state = None
        group.strategy.service_state = self._weights.state
        self.ledger = SampleLedger(server, Gate(group.credential), group.num_clients)
        self.seen = vectors.weights.read()
        self._server = server
        server.start()
        _logger.info("The parameter service answers on %s.", address)

    def exchange(
        self, weights: list[Any], state: list[Any], seen: list[Any], samples: int, push: bool
    ) -> list[Any]:
        """Exchanges in memory.

        Args:
            weights: the group's weights, a vector for each partition.
            state: its moving statistics, likewise.
            seen: the answer of the exchange before.
            samples: samples behind the change.
            push: whether to push weights; else the center's take no notice.

        Returns:
            The group's weights and moving statistics after the exchange.
        """
        new_state = []
        if self._state is not None:
            answers = self._state.exchange_locally(_GROUP, samples, state)
            pairs = zip(state, answers, strict=True)
            new_state = [self._state_rule.receive(own, own, answer) for own, answer in pairs]
        if not push:
            return [*weights, *new_state]
        messages = [self._rule.message(w, s) for w, s in zip(weights, seen, strict=True)]
        goes_on = [self._rule.after_sending(w, s) for w, s in zip(weights, seen, strict=True)]
        answers = self._weights.exchange_locally(_GROUP, samples, messages)
        self.seen = answers
        new = [self._rule.receive(w, w, a) for w, a in zip(goes_on, answers, strict=True)]
        return [*new, *new_state]

    def center(self) -> list[Any]:
        """The center, a vector for each partition."""
        return self._weights.center_partitions()

    def state_center(self) -> list[Any]:
        """The center of the moving statistics, likewise."""
        return self._state.center_partitions() if self._state is not None else []

    def versions(self) -> Any:
        """Updates of each partition of the weights so far."""
        return self._weights.versions()

    def training_clients(self) -> list[int]:
        """Async workers that train."""
        return self.ledger.present(Presence.TRAINING, self._within_seconds)

    def waiting_clients(self) -> list[int]:
        """Async workers that have ended and wait for the final weights."""
        return self.ledger.present(Presence.WAITING, self._within_seconds)
