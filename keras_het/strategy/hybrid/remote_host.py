"""The parameter service as the sync group's leader uses it where other processes hold it."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_het.strategy.hybrid.hosted_parts import CLOSE, DIRECTORY
from keras_het.strategy.hybrid.leader_ledger import LeaderLedger
from keras_het.strategy.hybrid.participant import STATE_PREFIX, WEIGHTS_PREFIX
from keras_het.strategy.hybrid.service_connection import CenterClient, Pending, connect
from keras_het.strategy.parameter_service import ParameterClient
from keras_het.strategy.parameter_service.ledger_client import LedgerClient, ServiceLostError
from keras_het.strategy.parameter_service.sample_ledger import Presence, Stage

_logger = logging.getLogger("keras_het")
_GROUP = 0


class RemoteHost:
    """Exchanges as an async worker does: what was sent travels while the group computes.

    Args:
        group: the sync group, whose present weights become the center.
        addresses: of all processes of the service, that with the ledger first.
        tasks: those of them that nobody else ends.

    Raises:
        ConnectionError: if one of them does not answer.
        PermissionError: if one refuses this group.
    """

    def __init__(self, group: Any, addresses: Sequence[str], tasks: Sequence[str]) -> None:
        self._group, self._options = group, group.options
        self._waits = group.rule.uses_gradients
        self._addresses, self._tasks = list(addresses), list(tasks)
        self._is_closed = False
        vectors = group.vectors
        self._weights_client = self._connect(
            vectors.weights, WEIGHTS_PREFIX, group.options.weights_wire
        )
        self._weights = CenterClient(self._weights_client, group.rule)
        self._state: CenterClient | None = None
        if vectors.state is not None:
            client = self._connect(vectors.state, STATE_PREFIX, None)
            client.restore(vectors.state.read())
            self._state = CenterClient(client, group.state_rule)
            self._state.adopt(self._state.pull())
        self._restore(group)
        self._weights.adopt(self._weights.pull())
        group.strategy.service_state = self._exported
        seconds = self._options.timeout_seconds
        self.ledger = LeaderLedger(LedgerClient(addresses[0], group.credential, _GROUP, seconds))
        self._pending: Pending | None = None
        self._is_lost = False
        self._next_try = 0.0
        _logger.info("The parameter service is at %s.", ", ".join(addresses))

    def start_epoch(self, epoch: int) -> None:
        """Begins an epoch, and with the first one lets async workers in."""

        def tell() -> None:
            self.ledger.start_epoch(epoch, *self._group.facts)
            self.ledger.set_stage(Stage.RUNNING)
            addresses = tf.constant(",".join(self._addresses))
            specs = (tf.TensorSpec([], tf.int32), tf.TensorSpec([], tf.string))
            self._tell(DIRECTORY, self._addresses[0], [addresses], specs)

        self._try(tell, None)

    def set_stage(self, stage: Stage) -> None:
        """Tells all async workers how far training is."""
        self._try(lambda: self.ledger.set_stage(stage), None)

    def exchange(
        self,
        weights: list[Any],
        state: list[Any],
        samples: int,
        push: bool,
        wait: bool = False,
    ) -> list[Any]:
        """Goes on from the last answer and sends anew, as `ServiceHost.exchange` otherwise.

        Args:
            weights: the group's weights, a vector for each partition.
            state: its moving statistics, likewise.
            samples: samples behind the change.
            push: whether to push weights.
            wait: whether to wait for the answer.

        Returns:
            The group's weights and moving statistics to go on with.
        """
        if self._is_lost and time.monotonic() < self._next_try:
            return [*weights, *state]
        try:
            return self._exchange(weights, state, samples, push, wait or self._waits)
        except ServiceLostError as error:
            self._lose(error)
            return [*weights, *state]

    def claim(self, epoch: int, count: int, following: int) -> tuple[int, int]:
        """Takes batches of an epoch for the group.

        Args:
            epoch: number of the epoch.
            count: how many.
            following: the batch after those that the group knows of, for a lost service.

        Returns:
            The first batch, and how many.
        """
        if not self._is_lost:
            try:
                return self.ledger.claim(_GROUP, epoch, count)
            except ServiceLostError as error:
                self._lose(error)
        return following, max(0, min(count, self._group.num_batches - following))

    def add_used(self, samples: int) -> None:
        """Counts samples that the group has used."""
        self._try(lambda: self.ledger.add_used(_GROUP, samples), None)

    def center(self) -> list[Any]:
        """The center, a vector for each partition; the group's weights without a service."""
        own = self._group.vectors.weights.read()
        return list(self._try(self._weights.pull, own))

    def state_center(self) -> list[Any]:
        """The center of the moving statistics, likewise."""
        if self._state is None:
            return []
        own = self._group.vectors.state.read()
        return list(self._try(self._state.pull, own))

    def versions(self) -> Any:
        """Updates of each partition of the weights so far."""
        if not self._is_closed:
            self._weights.pull()
        return self._weights.versions

    def training_clients(self) -> list[int]:
        """Async workers that train."""
        return self._present(Presence.TRAINING)

    def waiting_clients(self) -> list[int]:
        """Async workers that have ended and wait for the final weights."""
        return self._present(Presence.WAITING)

    def conclude(self) -> None:
        """Asks a last time for versions and counts, which stay readable."""
        self._try(self._weights.pull, None)
        self._try(self.ledger.keep, None)
        self._is_closed = True

    def close(self) -> None:
        """Tells the tasks of the service that training is over."""
        for address in self._tasks:
            # The answer may be lost with the server that ends.
            with contextlib.suppress(ServiceLostError):
                self._tell(CLOSE, address, [], _STATUS)

    def _exchange(
        self, weights: list[Any], state: list[Any], samples: int, push: bool, wait: bool
    ) -> list[Any]:
        if self._is_lost:
            self._attach_again()
        if self._state is not None:
            state = self._state.finish(self._state.send(state, samples), state)
        weights = self._finished(weights)
        if push:
            self._pending = self._weights.send(weights, samples)
            weights = self._pending.sent
        return [*(self._finished(weights) if wait else weights), *state]

    def _finished(self, weights: list[Any]) -> list[Any]:
        """The weights after the answer that is under way, if any."""
        if self._pending is not None:
            weights = self._weights.finish(self._pending, weights)
            self._pending = None
        return weights

    def _attach_again(self) -> None:
        if self._pending is not None:
            self._weights.send_again(self._pending)
            # raises if the service is still away; nothing has changed then
        self.ledger.add_used(_GROUP, 0)
        self._is_lost = False
        _logger.warning("The parameter service answers again.")

    def _present(self, presence: Presence) -> list[int]:
        seconds = self._options.presence_seconds
        found: list[int] = self._try(lambda: self.ledger.present(presence, seconds), [])
        return found

    def _try(self, ask: Any, otherwise: Any) -> Any:
        if self._is_lost:
            return otherwise
        try:
            return ask()
        except ServiceLostError as error:
            self._lose(error)
            return otherwise

    def _lose(self, error: ServiceLostError) -> None:
        if not self._options.goes_on_without_service:
            raise error
        self._next_try = time.monotonic() + self._options.timeout_seconds
        if not self._is_lost:
            self._is_lost = True
            _logger.warning("%s The sync group goes on alone.", error)

    def _connect(self, vectors: Any, prefix: str, wire: Any) -> ParameterClient:
        group = self._group
        client: ParameterClient = connect(
            lambda: ParameterClient(
                self._addresses,
                vectors.partitions,
                group.credential,
                _GROUP,
                self._options.timeout_seconds,
                wire,
                prefix,
            ),
            self._options.connect_seconds,
        )
        return client

    def _restore(self, group: Any) -> None:
        """Sets the center; also versions and the rule's state, if a backup brought them back."""
        saved, group.strategy.restored_service_state = group.strategy.restored_service_state, None
        states = None
        if saved is not None:
            states = _imported(saved, len(group.vectors.weights.partitions.sizes))
        self._weights_client.restore(group.vectors.weights.read(), states)

    def _exported(self) -> dict[str, np.ndarray]:
        """Versions and the rule's state, as arrays that a backup can keep."""
        return {
            f"part_{index}/{place}": np.frombuffer(text, np.uint8)
            for index, texts in enumerate(self._weights_client.export())
            for place, text in enumerate(texts.numpy())
        }

    def _tell(self, method: str, address: str, arguments: list[Any], specs: Any) -> Any:
        client = LedgerClient(
            address, self._group.credential, None, self._options.timeout_seconds, prefix=""
        )
        return client.ask(method, arguments, specs)


_STATUS = (tf.TensorSpec([], tf.int32),)


def _imported(saved: Mapping[str, np.ndarray], num_partitions: int) -> list[Any]:
    try:
        parts = []
        for index in range(num_partitions):
            names = [name for name in saved if name.startswith(f"part_{index}/")]
            places = sorted(int(name.rpartition("/")[2]) for name in names)
            texts = [saved[f"part_{index}/{place}"].tobytes() for place in places]
            parts.append(tf.constant(texts))
            if not texts:
                raise KeyError(f"part_{index}")
    except KeyError as error:
        raise ValueError(
            "The saved state is not that of a parameter service on tasks of its own. Received: "
            f"{sorted(saved)}. Remove the backup, or use the cluster that it was made with."
        ) from error
    return parts
