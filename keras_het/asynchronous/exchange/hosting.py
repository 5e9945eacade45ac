"""What a process holds of the center: described by its leader, and served to all."""

from __future__ import annotations

import dataclasses
import gc
import json
import logging
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_het.asynchronous.exchange.participant import STATE_PREFIX, WEIGHTS_PREFIX, Participant
from keras_het.asynchronous.parameter_service import ParameterService, Partitions, credential
from keras_het.asynchronous.parameter_service.sample_ledger import SampleLedger
from keras_het.asynchronous.parameter_service.wire import wire_named
from keras_het.asynchronous.rules import UpdateRule, get, serialize
from keras_het.rpc.admission import Gate, Status
from keras_het.rpc.channel import FunctionClient, NoAnswerError
from keras_het.rpc.server import FunctionServer
from keras_het.rpc.vector import spread_partitions

DIRECTORY, CLOSE, OFFER = "directory", "close", "offer"
Shapes = tuple[tuple[int, ...], ...]
_ABOUT = "keras_het parameter service 1"
_POLL_SECONDS = 0.05
_TEXT = tf.TensorSpec([], tf.string)
_logger = logging.getLogger("keras_het")


@dataclasses.dataclass(frozen=True)
class ServiceSpec:
    """A training's variables, rule and participants."""

    shapes: Shapes
    state_shapes: Shapes
    rule: dict[str, Any]
    state_rule: dict[str, Any]
    wire: str
    num_participants: int
    staleness_bound: int | None
    fingerprint: str
    num_services: int
    partition_size: int

    def make_rules(self) -> tuple[UpdateRule, UpdateRule]:
        rules = [get(dict(described)) for described in (self.rule, self.state_rule)]
        for rule in rules:
            if not isinstance(rule, UpdateRule):
                raise ValueError(
                    f"A parameter service cannot run the synchronous rule {rule.name!r}."
                )
        return rules[0], rules[1]  # type: ignore[return-value]

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ServiceSpec:
        values = json.loads(text)
        for name in ("shapes", "state_shapes"):
            values[name] = tuple(tuple(map(int, shape)) for shape in values[name])
        return cls(**values)


def spec_of(participant: Participant, num_services: int) -> ServiceSpec:
    vectors, options = participant.vectors, participant.options
    state = vectors.state.partitions.shapes if vectors.state is not None else ()
    return ServiceSpec(
        shapes=vectors.weights.partitions.shapes,
        state_shapes=state,
        rule=serialize(participant.rule),
        state_rule=serialize(participant.state_rule),
        wire=options.weights_wire.name,
        num_participants=participant.num_participants,
        staleness_bound=options.staleness_bound,
        fingerprint=participant.service_fingerprint,
        num_services=num_services,
        partition_size=vectors.weights.partitions.partition_size,
    )


class HostedParts:
    """Some partitions of center and moving statistics; the first process also has the ledger."""

    def __init__(
        self,
        address: str,
        place: int,
        spec: ServiceSpec,
        secret: bytes,
        rules: tuple[UpdateRule, UpdateRule] | None = None,
    ) -> None:
        self.address = address
        self.rule, self.state_rule = spec.make_rules() if rules is None else rules
        self.server = FunctionServer(address)
        self.spec, self._place = spec, place
        self._proof = credential(secret, spec.fingerprint)
        gate = Gate(self._proof)
        options = {"wire": wire_named(spec.wire), "staleness_bound": spec.staleness_bound}
        self.weights = self._service(spec.shapes, self.rule, WEIGHTS_PREFIX, **options)
        self.state: ParameterService | None = None
        if spec.state_shapes:
            self.state = self._service(spec.state_shapes, self.state_rule, STATE_PREFIX)
        self.ledger: SampleLedger | None = None
        if place == 0:
            self.ledger = SampleLedger(self.server, gate, spec.num_participants)
        with tf.init_scope(), tf.device("CPU:0"):
            self._addresses = tf.Variable("", trainable=False)
            self._is_closed = tf.Variable(False, trainable=False)
        directory = tf.function(self._directory, input_signature=[_TEXT], autograph=False)
        self.server.register(DIRECTORY, directory, gate)
        close = tf.function(self._close, input_signature=[], autograph=False)
        self.server.register(CLOSE, close, gate)

    def start(self) -> None:
        self.server.start()

    def close(self) -> None:
        self.server.close()

    @property
    def is_closed(self) -> bool:
        return bool(self._is_closed)

    def _service(
        self, shapes: Shapes, rule: UpdateRule, prefix: str, **options: Any
    ) -> ParameterService:
        partitions = Partitions(shapes, self.spec.partition_size)
        places = spread_partitions(partitions.sizes, self.spec.num_services)
        return ParameterService(
            self.address,
            partitions,
            rule,
            self._proof,
            self.spec.num_participants,
            prefix=prefix,
            server=self.server,
            indices=[index for index, place in enumerate(places) if place == self._place],
            awaits_center=True,
            **options,
        )

    def _directory(self, addresses: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the location of the parts; the leader sets it by passing `addresses`."""
        latest = tf.cond(
            tf.greater(tf.strings.length(addresses), 0),
            lambda: tf.identity(self._addresses.assign(addresses, read_value=True)),
            self._addresses.read_value,
        )
        return tf.constant(int(Status.OK)), latest

    def _close(self) -> tf.Tensor:
        self._is_closed.assign(True)
        return tf.constant(int(Status.OK))


def make_offer(
    address: str, secret: bytes, spec: ServiceSpec, place: int, timeout_seconds: float
) -> None:
    client = FunctionClient(address, credential(secret, _ABOUT), timeout_seconds)
    text = tf.constant(json.dumps([place, spec.to_json()]))
    try:
        status = client.ask(OFFER, [text], tf.TensorSpec([], tf.int32))
    except NoAnswerError as error:
        raise ConnectionError(
            f"There is no parameter service: {error} Start `keras-het serve` on that machine, with "
            "the same TF_CONFIG and secret."
        ) from error
    if int(status) != Status.OK:
        raise PermissionError(
            f"The parameter service at {address} refused this training: its shared secret differs. "
            "Use the same secret on every task."
        )


def _read_offer(text: str) -> tuple[int, ServiceSpec]:
    """Return which of its services a process is to be of the offered training, and that."""
    try:
        place, described = json.loads(text)
        return int(place), ServiceSpec.from_json(described)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"The offer of a training cannot be read. Received: {text[:200]!r} ({error}). Use "
            "the same version of keras_het on every task."
        ) from error


class ServingProcess:
    """A process that serves one training after another, each as its leader has offered it."""

    def __init__(
        self,
        address: str,
        secret: bytes,
        is_stopped: Callable[[], bool],
        say: Callable[[str], None] = _logger.info,
    ) -> None:
        self.address, self._secret = address, secret
        self._is_stopped, self._say = is_stopped, say
        self._gate = Gate(credential(secret, _ABOUT))
        with tf.init_scope(), tf.device("CPU:0"):
            self._offer = tf.Variable("", trainable=False)

    @property
    def is_offered_another(self) -> bool:
        """Whether a waiting leader has offered a training, having abandoned the previous one."""
        return bool(self._offer.numpy())

    def serve_one(self) -> bool:
        """Wait for a training and serve it to its end; return whether there was one.

        A restarted leader offers again, which ends the training that it abandoned.
        """
        self._say(f"waiting for a training at {self.address}")
        parts = None
        while parts is None:
            if not self._wait_for_offer():
                return False
            parts = self._make_parts()
        spec = parts.spec
        self.take_offers_on(parts.server)
        parts.start()
        held = len(parts.weights.indices)
        self._say(
            f"serving {held} partition{'s' * (held != 1)} of {len(spec.shapes)} variables to "
            f"{spec.num_participants} participants, rule {parts.rule.name}"
        )
        while not (parts.is_closed or self.is_offered_another or self._is_stopped()):
            time.sleep(_POLL_SECONDS)
        self._say("training has ended" if parts.is_closed else "training was left")
        parts.close()
        return True

    def take_offers_on(self, server: FunctionServer) -> None:
        """Accept offers on a server that has not started."""

        @tf.function(input_signature=[_TEXT], autograph=False)
        def offer(text: tf.Tensor) -> tf.Tensor:
            self._offer.assign(text)
            return tf.constant(int(Status.OK))

        server.register(OFFER, offer, self._gate)

    def _wait_for_offer(self) -> bool:
        """Listen until there is an offer; return whether there is one."""
        if not self.is_offered_another:
            server = FunctionServer(self.address)
            self.take_offers_on(server)
            server.start()
            while not self.is_offered_another and not self._is_stopped():
                time.sleep(_POLL_SECONDS)
            server.close()
        return self.is_offered_another

    def _make_parts(self) -> HostedParts | None:
        """Create the parts that the leader requests; None if the request cannot be read."""
        text = self._offer.numpy().decode()
        self._offer.assign("")
        try:
            return HostedParts(self.address, *_read_offer(text), self._secret)
        except (AttributeError, TypeError, ValueError) as error:  # as from another version
            self._say(f"an offer was not taken: {error}")
        # TensorFlow ends a server with its last reference, and with it a later one at its address.
        gc.collect()
        return None
