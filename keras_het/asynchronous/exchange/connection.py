"""A participant's connections to the parameter service."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from keras_het.asynchronous.exchange.exchange_engine import VectorExchange
from keras_het.asynchronous.exchange.participant import Participant
from keras_het.asynchronous.parameter_service.client import (
    Channel,
    ParameterClient,
    RemoteChannel,
    ServiceLostError,
)
from keras_het.asynchronous.parameter_service.sample_ledger import LedgerConnection, Presence, Stage
from keras_het.asynchronous.parameter_service.wire import Wire
from keras_het.exchange.message import Kind, Message
from keras_het.strategy.cluster.cluster_config import GROUP_PROCESSES, config_of

_POLL_SECONDS = 0.05
MadeT = TypeVar("MadeT")
_SILENT_SECONDS = 10.0  # of waiting for a service that has yet to start
_logger = logging.getLogger(__name__)
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
        except (ConnectionError, ServiceLostError) as error:
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
    participant: Participant, channels: Sequence[Channel], wire: Wire | None
) -> VectorExchange:
    """Connect to the center of weights, and of moving statistics if there are any."""
    vectors, rule = participant.vectors, participant.rule
    state = None if vectors.state is None else vectors.state.partitions
    client = ParameterClient(channels, vectors.weights.partitions, wire, rule.may_wait, state)
    client.greet()
    return VectorExchange(client, rule, participant.state_rule)


class Connection(NamedTuple):
    """An async worker's exchange with a service, its ledger, and one for its heartbeat."""

    exchange: VectorExchange
    ledger: LedgerConnection
    heartbeat: LedgerConnection
    close: Callable[[], None]


def open_connection(participant: Participant, number: int) -> Connection:
    """Connect an async worker to a service; what is open is closed again if that fails."""

    def channel(address: str) -> RemoteChannel:
        seconds = participant.options.timeout_seconds
        made = RemoteChannel(address, participant.credential, number, seconds)
        opened.callback(made.close)
        return made

    with contextlib.ExitStack() as opened:
        # On a shared connection, short messages would queue behind the weights.
        first = channel(config_of(participant.strategy).service_address())
        ledger = LedgerConnection(first)
        channels = [channel(address) for address in _find_addresses(participant, ledger, first)]
        wire = participant.options.wire
        exchange = connect_vectors(participant, channels, wire)
        return Connection(exchange, ledger, LedgerConnection(first), opened.pop_all().close)


def _find_addresses(
    participant: Participant, ledger: LedgerConnection, first: Channel
) -> list[str]:
    """Ask the first process of the service for the addresses of the others."""
    facts = ledger.report(Presence.GONE)
    is_over = facts.stage == Stage.CLOSED and facts.run < participant.run
    answer = first.ask(Message(Kind.DIRECTORY, (), (np.zeros(0, np.uint8),)))
    addresses = answer.vectors[0].tobytes().decode()
    if is_over or not addresses:
        raise ConnectionError(
            f"The parameter service at {first.address} runs but is not training now. Received: "
            f"{'an ended training' if is_over else 'one that has not begun'}."
        )
    return addresses.split(",")
