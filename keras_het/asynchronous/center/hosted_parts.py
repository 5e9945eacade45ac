"""The parts of a parameter service that one process holds."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_het.asynchronous.center.service_spec import ServiceSpec, Shapes
from keras_het.asynchronous.exchange.participant import STATE_PREFIX, WEIGHTS_PREFIX
from keras_het.asynchronous.parameter_service import ParameterService, Partitions, credential
from keras_het.asynchronous.parameter_service.sample_ledger import SampleLedger
from keras_het.asynchronous.rules import UpdateRule
from keras_het.rpc.admission import Status
from keras_het.rpc.function_server import FunctionServer
from keras_het.rpc.gate import Gate
from keras_het.rpc.partitions import spread_partitions
from keras_het.rpc.served_function import TfFunction

DIRECTORY, CLOSE = "directory", "close"


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
        own = spec.make_rules() if rules is None else rules
        self.rule, self.state_rule = own
        self.server = FunctionServer(address)
        self.spec, self._place = spec, place
        self._proof = credential(secret, spec.fingerprint)
        gate = Gate(self._proof)
        wire, bound = spec.make_wire(), spec.staleness_bound
        self.weights = self._service(
            spec.shapes, self.rule, WEIGHTS_PREFIX, wire=wire, staleness_bound=bound
        )
        self.state: ParameterService | None = None
        if spec.state_shapes:
            self.state = self._service(spec.state_shapes, self.state_rule, STATE_PREFIX)
        self.ledger: SampleLedger | None = None
        if place == 0:
            self.ledger = SampleLedger(self.server, gate, spec.num_participants)
        with tf.init_scope(), tf.device("CPU:0"):
            self._addresses = tf.Variable("", trainable=False)
            self._is_closed = tf.Variable(False, trainable=False)
        self.server.register(DIRECTORY, self._directory_function(), gate)
        self.server.register(CLOSE, self._close_function(), gate)

    def start(self) -> None:
        """Start answering."""
        self.server.start()

    def close(self) -> None:
        """Stop answering and release the port."""
        self.server.close()

    def tell_addresses(self, addresses: list[str]) -> None:
        """Open the service to async workers, which wait for the locations of the parts."""
        self._addresses.assign(",".join(addresses))

    @property
    def is_closed(self) -> bool:
        """Whether the leader has announced the end of training."""
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

    def _directory_function(self) -> TfFunction:
        @tf.function(input_signature=[tf.TensorSpec([], tf.string)], autograph=False)
        def directory(addresses: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            """Return the location of the parts; the leader sets it by passing `addresses`."""
            is_set = tf.greater(tf.strings.length(addresses), 0)
            tf.cond(is_set, lambda: self._set(addresses), lambda: tf.constant(True))
            return tf.constant(int(Status.OK)), self._addresses.read_value()

        return directory

    def _set(self, addresses: tf.Tensor) -> tf.Tensor:
        self._addresses.assign(addresses)
        return tf.constant(True)

    def _close_function(self) -> TfFunction:
        @tf.function(input_signature=[], autograph=False)
        def close() -> tf.Tensor:
            self._is_closed.assign(True)
            return tf.constant(int(Status.OK))

        return close
