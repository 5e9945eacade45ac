"""A participant's connections to the parameter service."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import tensorflow as tf

from keras_het.asynchronous.exchange.exchange_engine import VectorExchange
from keras_het.asynchronous.exchange.hosting import DIRECTORY
from keras_het.asynchronous.exchange.participant import (
    STATE_PREFIX,
    WEIGHTS_PREFIX,
    Participant,
    first_async_participant,
)
from keras_het.asynchronous.parameter_service import ParameterClient, Wire
from keras_het.asynchronous.parameter_service.sample_ledger import (
    LedgerConnection,
    Presence,
    ServiceLostError,
    Stage,
)
from keras_het.rpc.channel import Channel, FunctionClient
from keras_het.strategy.cluster.cluster_config import GROUP_PROCESSES, config_of

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
        if _group_has_ended():
            raise ConnectionError(
                "The training has ended without this async worker: the processes of the sync group "
                "are gone. Train for longer, or leave this worker out."
            )
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


def _group_has_ended() -> bool:
    """Whether the processes of the sync group are known, and gone."""
    group = os.environ.get(GROUP_PROCESSES, "")
    for process_id in map(int, filter(None, group.split(","))):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process_id, 0)  # asks whether it is there
            return False
    return bool(group)


def connect_vectors(
    participant: Participant,
    number: int,
    addresses: Sequence[str],
    wire: Wire | None,
    channels: Sequence[Channel] = (),
) -> list[VectorExchange]:
    """Connect to the center of the weights, and to that of moving statistics if there are any."""
    access = participant.credential, number, participant.options.timeout_seconds
    vectors = participant.vectors
    client = ParameterClient(
        addresses, vectors.weights.partitions, *access, wire, WEIGHTS_PREFIX, channels
    )
    exchanges = [VectorExchange(client, participant.rule)]
    if vectors.state is not None:
        client = ParameterClient(
            addresses, vectors.state.partitions, *access, None, STATE_PREFIX, channels
        )
        exchanges.append(VectorExchange(client, participant.state_rule))
    return exchanges


def open_connection(
    participant: Participant, number: int
) -> tuple[list[VectorExchange], LedgerConnection, LedgerConnection]:
    """Return an async worker's exchanges with a service, its ledger, and one for its heartbeat."""
    seconds = participant.options.timeout_seconds
    first = config_of(participant.strategy).service_address()
    ledger, heartbeat = (
        LedgerConnection(FunctionClient(first, participant.credential, seconds), number)
        for _ in range(2)
    )
    addresses = _find_addresses(participant, ledger, first)
    wire = participant.options.wire_of(number - first_async_participant(participant.strategy))
    return connect_vectors(participant, number, addresses, wire), ledger, heartbeat


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
