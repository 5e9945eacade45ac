"""An async worker's connection to the parameter service."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from typing import TypeVar

import tensorflow as tf

from keras_het.asynchronous.center.hosted_parts import DIRECTORY
from keras_het.asynchronous.center.vector_exchange import VectorExchange
from keras_het.asynchronous.exchange.participant import (
    STATE_PREFIX,
    WEIGHTS_PREFIX,
    Participant,
    first_async_participant,
)
from keras_het.asynchronous.parameter_service import ParameterClient
from keras_het.asynchronous.parameter_service.ledger_connection import (
    LedgerConnection,
    ServiceLostError,
)
from keras_het.asynchronous.parameter_service.sample_ledger import Presence, Stage
from keras_het.rpc.function_client import FunctionClient
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
    """Connect to weights, moving statistics and ledger of a service."""
    options, vectors = participant.options, participant.vectors
    first = config_of(participant.strategy).service_address()
    access = participant.credential, number, options.timeout_seconds
    ledger = LedgerConnection(first, *access)
    addresses = _find_addresses(participant, ledger, first)
    wire = options.wire_of(number - first_async_participant(participant.strategy))
    weights = ParameterClient(
        addresses, vectors.weights.partitions, *access, wire, prefix=WEIGHTS_PREFIX
    )
    state = None
    if vectors.state is not None:
        transport = ParameterClient(
            addresses, vectors.state.partitions, *access, prefix=STATE_PREFIX
        )
        state = VectorExchange(transport, participant.state_rule)
    center = VectorExchange(weights, participant.rule)
    return Connection(center, state, ledger, LedgerConnection(first, *access))


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
