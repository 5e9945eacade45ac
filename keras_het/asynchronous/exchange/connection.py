"""Connections to the parameter service: an async worker's, and its leader's."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np
import tensorflow as tf

from keras_het.asynchronous.exchange.exchange_engine import VectorExchange
from keras_het.asynchronous.exchange.hosting import (
    CLOSE,
    DIRECTORY,
    HostedParts,
    make_offer,
    spec_of,
)
from keras_het.asynchronous.exchange.participant import (
    STATE_PREFIX,
    WEIGHTS_PREFIX,
    Participant,
    first_async_participant,
)
from keras_het.asynchronous.parameter_service import ParameterClient, Wire
from keras_het.asynchronous.parameter_service.sample_ledger import (
    LEADER,
    LeaderLedger,
    LedgerConnection,
    Presence,
    ServiceLostError,
    Stage,
)
from keras_het.rpc.channel import Channel, FunctionClient, LocalChannel, NoAnswerError
from keras_het.rpc.vector import PartitionedVector
from keras_het.strategy.cluster.cluster_config import config_of

_POLL_SECONDS = 0.05
MadeT = TypeVar("MadeT")
_SILENT_SECONDS = 10.0  # of waiting for a service that has yet to start
_logger = logging.getLogger("keras_het")
_WAITS = "No parameter service for %.0f s; waiting up to %g s for it to start. %s(%s)"


def connect(make: Callable[[], MadeT], wait_seconds: float, hint: str = "") -> MadeT:
    """Call `make` until the service is present; report a long wait once."""
    began = time.monotonic()
    says_so_after = _SILENT_SECONDS
    while True:
        try:
            return make()
        except ConnectionError as error:
            waited = time.monotonic() - began
            if waited > wait_seconds:
                raise
            if waited > says_so_after:
                says_so_after = wait_seconds
                _logger.warning(_WAITS, waited, wait_seconds, hint and f"{hint} ", error)
            time.sleep(_POLL_SECONDS)


@dataclasses.dataclass(frozen=True)
class Connection:
    """An async worker's connection to the service."""

    weights: VectorExchange
    state: VectorExchange | None
    ledger: LedgerConnection
    heartbeat: LedgerConnection


def open_connection(participant: Participant, number: int) -> Connection:
    options, vectors = participant.options, participant.vectors
    first = config_of(participant.strategy).service_address()
    access = participant.credential, number, options.timeout_seconds
    ledger, heartbeat = (
        LedgerConnection(FunctionClient(first, access[0], access[2]), number) for _ in range(2)
    )
    addresses = _find_addresses(participant, ledger, first)
    wire = options.wire_of(number - first_async_participant(participant.strategy))
    weights = ParameterClient(
        addresses, vectors.weights.partitions, *access, wire, prefix=WEIGHTS_PREFIX
    )
    state = None
    if vectors.state is not None:
        own = ParameterClient(addresses, vectors.state.partitions, *access, prefix=STATE_PREFIX)
        state = VectorExchange(own, participant.state_rule)
    return Connection(VectorExchange(weights, participant.rule), state, ledger, heartbeat)


def _find_addresses(participant: Participant, ledger: LedgerConnection, first: str) -> list[str]:
    """Ask the first process of the service for the addresses of the others."""
    seconds = participant.options.timeout_seconds
    directory = FunctionClient(first, participant.credential, seconds)
    specs = (tf.TensorSpec([], tf.int32), tf.TensorSpec([], tf.string))
    try:
        facts = ledger.report(Presence.GONE)
        is_over = facts.stage == Stage.CLOSED and facts.training.run < participant.run
        answer = directory.ask(DIRECTORY, [tf.constant("")], specs)
    except ServiceLostError as error:
        raise ConnectionError(str(error)) from error
    addresses = bytes(answer[1].numpy()).decode()
    if is_over or not addresses:
        raise ConnectionError(
            f"The parameter service at {first} is there but does not train now. Received: "
            f"{'an ended training' if is_over else 'one that has not begun'}."
        )
    return addresses.split(",")


class LeaderConnection:
    """The leader's connection to the processes that hold parts, to which it brings the center.

    If one process holds all and it is the leader's own, the channel to it is one within it.
    """

    awaits_center = False

    def __init__(
        self,
        leader: Participant,
        addresses: Sequence[str],
        tasks: Sequence[str] = (),
        own: HostedParts | None = None,
    ) -> None:
        self._leader, self._own = leader, None if own is None else LocalChannel(own.server)
        self.addresses, self._tasks = list(addresses), list(tasks)
        options, vectors = leader.options, leader.vectors
        seconds = options.connect_seconds
        self._offer(self._tasks, seconds)
        self.weights = connect(
            lambda: self._client(vectors.weights, WEIGHTS_PREFIX, options.weights_wire), seconds
        )
        self.state: ParameterClient | None = None
        if (state := vectors.state) is not None:
            self.state = connect(lambda: self._client(state, STATE_PREFIX, None), seconds)
        self.ledger = LeaderLedger(self._channels()[0])

    @property
    def answers_at_once(self) -> bool:
        return self.weights.answers_at_once

    def bring_center(self, saved: Mapping[str, np.ndarray] | None = None) -> None:
        """Make the leader's current weights and moving statistics the center."""
        vectors = self._leader.vectors
        self.weights.restore(vectors.weights.read(), saved)
        if self.state is not None and vectors.state is not None:
            self.state.restore(vectors.state.read())

    def exported(self) -> dict[str, np.ndarray]:
        try:
            return self.weights.export()
        except ConnectionError as error:
            raise ServiceLostError(str(error)) from error

    def restarted(self) -> list[str]:
        """Return the addresses of restarted processes that do not know this training."""
        found = []
        for channel in self._channels():
            try:
                channel.ask(f"{WEIGHTS_PREFIX}hello", [], tf.TensorSpec([], tf.int32))
            except NoAnswerError as error:
                if not error.is_unknown_function:
                    raise ServiceLostError(f"The parameter service at {error}") from error
                found.append(channel.address)
        return found

    def begin_again(self, restarted: Sequence[str]) -> None:
        """Assign parts to restarted processes, and make the weights the center."""
        seconds = self._leader.options.timeout_seconds
        self.awaits_center = True  # until the leader has it back: another try must redo everything
        try:
            self._offer(restarted, seconds)
            for client in (self.weights, self.state):
                if client is not None:
                    connect(client.greet, seconds)
            self.bring_center()
        except ConnectionError as error:
            raise ServiceLostError(str(error)) from error

    def open_directory(self) -> None:
        text = tf.constant(",".join(self.addresses))
        specs = (tf.TensorSpec([], tf.int32), tf.TensorSpec([], tf.string))
        try:
            self._channels()[0].ask(DIRECTORY, [text], specs)
        except NoAnswerError as error:
            raise ServiceLostError(f"The parameter service at {error}") from error

    def close_training(self) -> None:
        try:
            for client in (self.weights, self.state):
                if client is not None:
                    client.close_training()
        except ConnectionError as error:
            raise ServiceLostError(str(error)) from error

    def close(self, timeout_seconds: float | None = None) -> None:
        """Tell all tasks of the service at once that training is over."""
        leader = self._leader
        seconds = leader.options.timeout_seconds if timeout_seconds is None else timeout_seconds
        clients = [FunctionClient(task, leader.credential, seconds) for task in self._tasks]
        for call in [client.call(CLOSE, [], tf.TensorSpec([], tf.int32)) for client in clients]:
            bool(call.is_ok())  # waits; the answer may be lost with the ending server

    def _offer(self, tasks: Sequence[str], patience: float) -> None:
        leader = self._leader
        spec = spec_of(leader, len(self.addresses))
        for address in tasks:
            place = self.addresses.index(address)
            offer = address, leader.secret, spec, place, leader.options.timeout_seconds
            connect(functools.partial(make_offer, *offer), patience)

    def _client(
        self, vectors: PartitionedVector, prefix: str, wire: Wire | None
    ) -> ParameterClient:
        access = self._leader.credential, LEADER, self._leader.options.timeout_seconds
        wire = wire if self._own is None else None  # within the process nothing is rounded
        return ParameterClient(
            self.addresses, vectors.partitions, *access, wire, prefix, self._channels()
        )

    def _channels(self) -> Sequence[Channel]:
        """Return a new channel to each process."""
        if self._own is not None:
            return [self._own]
        leader = self._leader
        seconds = leader.options.timeout_seconds
        return [FunctionClient(at, leader.credential, seconds) for at in self.addresses]
