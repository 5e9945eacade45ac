"""What a process holds of the center: described by its leader, and served to all."""

from __future__ import annotations

import dataclasses
import json
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from keras_het.asynchronous.parameter_service.client import SERVICE
from keras_het.asynchronous.parameter_service.sample_ledger import (
    LEADER,
    LEDGER_KINDS,
    SampleLedger,
)
from keras_het.asynchronous.parameter_service.service import ParameterService
from keras_het.asynchronous.parameter_service.wire import Partitions, spread_partitions, wire_named
from keras_het.exchange.client import Client
from keras_het.exchange.message import Kind, Message
from keras_het.exchange.secret import credential
from keras_het.exchange.server import Server
from keras_het.rules import UpdateRule, get

Shapes = tuple[tuple[int, ...], ...]
_OFFERS = "offers"
"""Name of the service by which a process takes trainings."""
_ABOUT = "keras_het parameter service 3"
_POLL_SECONDS = 0.05
_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ServiceSpec:
    """A training's variables, rule and participants."""

    shapes: Shapes
    state_shapes: Shapes
    rule: dict[str, Any]
    state_rule: dict[str, Any]
    wire: str
    num_participants: int
    max_staleness: int | None
    fingerprint: str
    num_services: int
    partition_bytes: int

    def make_rules(self) -> tuple[UpdateRule, UpdateRule]:
        rules = [get(dict(described)) for described in (self.rule, self.state_rule)]
        for rule in rules:
            if not isinstance(rule, UpdateRule):
                raise ValueError(
                    f"A parameter service cannot run the synchronous rule {rule.name!r}."
                )
        return rules[0], rules[1]  # type: ignore[return-value]


class HostedParts:
    """Some partitions of center and moving statistics; the first process also has the ledger."""

    # The spec names the rules unless a process has its own, which need not be in `RULES`.

    def __init__(
        self,
        server: Server,
        place: int,
        spec: ServiceSpec,
        secret: bytes,
        rules: tuple[UpdateRule, UpdateRule] | None = None,
    ) -> None:
        self.spec, self._server = spec, server
        self.rule, state_rule = spec.make_rules() if rules is None else rules
        self.parameters = ParameterService(spec.num_participants)
        shapes = filter(None, (spec.shapes, spec.state_shapes))
        weights, *state = [Partitions(each, spec.partition_bytes) for each in shapes]
        sizes = [size for each in (weights, *state) for size in each.sizes]
        places = spread_partitions(sizes, spec.num_services)
        held = {number for number, at in enumerate(places) if at == place}
        wire = wire_named(spec.wire)
        self.parameters.hold(weights, self.rule, 0, held, wire, spec.max_staleness)
        self.num_parts = len(self.parameters.parts)
        for each in state:
            self.parameters.hold(each, state_rule, len(weights.sizes), held)
        self.ledger = SampleLedger(spec.num_participants) if place == 0 else None
        self._addresses = np.zeros(0, np.uint8)
        self.is_closed = threading.Event()
        self._credential = credential(secret, spec.fingerprint)

    def start(self) -> None:
        """Answer participants from now on."""
        self._server.serve(SERVICE, self._credential, self.handle)

    def handle(
        self, sender: int, request: Message, is_own: bool = False
    ) -> Message | Future[Message]:
        """Answer a message of a participant, or of the leader in this process."""
        if request.kind is Kind.DIRECTORY:
            (addresses,) = request.vectors
            if len(addresses) and sender == LEADER:
                self._addresses = addresses
            return Message(Kind.DIRECTORY, (), (self._addresses,))
        if request.kind is Kind.FINISH:
            self.is_closed.set()
            return Message(Kind.DONE)
        if request.kind not in LEDGER_KINDS:
            if request.kind is Kind.CLOSE_TRAINING:
                self._server.end(SERVICE)
            return self.parameters.handle(sender, request, is_own)
        if self.ledger is None:
            raise ValueError("The first process of the service has the ledger. Received: another.")
        return self.ledger.handle(sender, request)


def make_offer(
    address: str, secret: bytes, spec: ServiceSpec, place: int, timeout_seconds: float
) -> None:
    """Ask a process that serves only to hold parts of a training."""
    text = json.dumps([place, dataclasses.asdict(spec)]).encode()
    client = Client(address, _OFFERS, credential(secret, _ABOUT))
    try:
        client.ask(Message(Kind.OFFER, (), (np.frombuffer(text, np.uint8),)), timeout_seconds)
    except (ConnectionError, TimeoutError, NotImplementedError) as error:
        raise ConnectionError(
            f"There is no parameter service: {error} Start `keras-het parameter-server` on that "
            "machine, with the same TF_CONFIG and secret."
        ) from error
    except PermissionError as error:
        raise PermissionError(
            f"The parameter service at {address} refused this training: its shared secret differs. "
            "Use the same secret on every task."
        ) from error
    finally:
        client.close()


class ServingProcess:
    """A process that serves one training after another, each as its leader has offered it."""

    def __init__(
        self,
        address: str,
        secret: bytes,
        is_stopped: Callable[[], bool],
        say: Callable[[str], None] = _logger.info,
    ) -> None:
        self._secret, self._is_stopped, self._say = secret, is_stopped, say
        self._offered: HostedParts | None = None
        self._lock = threading.Lock()
        self._server = Server(address)
        self.address = self._server.address
        self._server.serve(_OFFERS, credential(secret, _ABOUT), self._take_offer)
        self._server.start()

    @property
    def is_offered_another(self) -> bool:
        """Whether a leader waits, which has abandoned the present training."""
        return self._offered is not None

    def serve_one(self) -> bool:
        """Wait for a training and serve it to its end; return whether there was one."""
        # A restarted leader offers again, which ends the training that it abandoned.
        self._say(f"waiting for a training at {self.address}")
        while (parts := self._take_offered()) is None:
            if self._is_stopped():
                return False
            time.sleep(_POLL_SECONDS)
        spec, held = parts.spec, parts.num_parts
        self._say(
            f"serving {held} partition{'s' * (held != 1)} of {len(spec.shapes)} variables to "
            f"{spec.num_participants} participants, rule {parts.rule.name}"
        )
        while not (parts.is_closed.is_set() or self.is_offered_another or self._is_stopped()):
            time.sleep(_POLL_SECONDS)
        self._say("training has ended" if parts.is_closed.is_set() else "training was left")
        with self._lock:
            if not self.is_offered_another:
                self._server.withdraw(SERVICE)
        return True

    def _take_offered(self) -> HostedParts | None:
        with self._lock:
            parts, self._offered = self._offered, None
        return parts

    def close(self) -> None:
        """Stop listening."""
        self._server.close()

    def _take_offer(self, sender: int, request: Message) -> Message:
        if request.kind is not Kind.OFFER:
            raise ValueError(f"Received: {request.kind.name}; expected: OFFER.")
        text = request.vectors[0].tobytes().decode(errors="replace")
        try:
            place, spec = json.loads(text)
            parts = HostedParts(self._server, int(place), ServiceSpec(**spec), self._secret)
        except Exception as error:  # as of types that another version sends
            self._say(f"an offer was rejected: {error}")
            raise ValueError(
                f"The offer of a training was rejected. Received: {text[:200]!r} ({error}). Use "
                "the same version of keras_het on every task."
            ) from error
        with self._lock:
            self._offered = parts
            parts.start()
        return Message(Kind.DONE)
