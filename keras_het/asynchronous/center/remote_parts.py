"""The leader's interface to the processes that hold the center."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_het.asynchronous.center.hosted_parts import CLOSE, DIRECTORY
from keras_het.asynchronous.center.leader_ledger import LeaderLedger
from keras_het.asynchronous.center.offers import make_offer
from keras_het.asynchronous.center.service_connection import connect
from keras_het.asynchronous.center.service_spec import ServiceSpec, spec_of
from keras_het.asynchronous.exchange.model_vectors import VariableVectors
from keras_het.asynchronous.exchange.participant import STATE_PREFIX, WEIGHTS_PREFIX, Participant
from keras_het.asynchronous.parameter_service import ParameterClient, Wire
from keras_het.asynchronous.parameter_service.ledger_connection import (
    LedgerConnection,
    ServiceLostError,
)
from keras_het.asynchronous.parameter_service.sample_ledger import LEADER
from keras_het.asynchronous.parameter_service.saved_state import from_arrays, to_arrays
from keras_het.rpc.function_client import FunctionClient, NoAnswerError


class RemoteParts:
    """Assignment of parts to the processes, connection to them, and transfer of the center."""

    answers_at_once = False
    awaits_center = False

    def __init__(self, leader: Participant, addresses: Sequence[str], tasks: Sequence[str]) -> None:
        self._leader = leader
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
        asked = LedgerConnection(addresses[0], leader.credential, LEADER, options.timeout_seconds)
        self.ledger = LeaderLedger(asked)

    def bring_center(self, saved: Mapping[str, np.ndarray] | None = None) -> None:
        """Make the leader's current weights and moving statistics the center."""
        vectors = self._leader.vectors
        states = None
        if saved is not None:
            states = from_arrays(saved, len(vectors.weights.partitions.sizes))
        self.weights.restore(vectors.weights.read(), states)
        if self.state is not None and vectors.state is not None:
            self.state.restore(vectors.state.read())

    def exported(self) -> dict[str, np.ndarray]:
        """Return versions and rule state, as arrays that a backup can keep."""
        try:
            return to_arrays(self.weights.export())
        except ConnectionError as error:
            raise ServiceLostError(str(error)) from error

    def restarted(self) -> list[str]:
        """Return the addresses of restarted processes that do not know this training."""
        found = []
        for address in self.addresses:
            try:
                self._tell(address, f"{WEIGHTS_PREFIX}hello", [], tf.TensorSpec([], tf.int32))
            except NoAnswerError as error:
                if not error.is_unknown_function:
                    raise ServiceLostError(f"The parameter service at {error}") from error
                found.append(address)
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
        """Admit async workers: tell them where the parts are."""
        first, text = self.addresses[0], tf.constant(",".join(self.addresses))
        specs = (tf.TensorSpec([], tf.int32), tf.TensorSpec([], tf.string))
        try:
            self._tell(first, DIRECTORY, [text], specs)
        except NoAnswerError as error:
            raise ServiceLostError(f"The parameter service at {error}") from error

    def close_training(self) -> None:
        """Make all processes reject further pushes."""
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
            connect(_offering(leader, address, spec, place), patience)

    def _client(self, vectors: VariableVectors, prefix: str, wire: Wire | None) -> ParameterClient:
        seconds, proof = self._leader.options.timeout_seconds, self._leader.credential
        return ParameterClient(
            self.addresses, vectors.partitions, proof, LEADER, seconds, wire, prefix
        )

    def _tell(
        self,
        address: str,
        method: str,
        arguments: list[tf.Tensor],
        specs: tf.TensorSpec | tuple[tf.TensorSpec, ...],
    ) -> Any:
        leader = self._leader
        client = FunctionClient(address, leader.credential, leader.options.timeout_seconds)
        return client.ask(method, arguments, specs)


def _offering(
    leader: Participant, address: str, spec: ServiceSpec, place: int
) -> Callable[[], None]:
    seconds = leader.options.timeout_seconds
    return lambda: make_offer(address, leader.secret, spec, place, seconds)
