"""Offers that tell a process without a model what to serve."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import tensorflow as tf

from keras_het.asynchronous.center.service_spec import ServiceSpec
from keras_het.asynchronous.parameter_service import Status, credential
from keras_het.rpc.function_client import FunctionClient, NoAnswerError
from keras_het.rpc.function_server import FunctionServer
from keras_het.rpc.gate import Gate

OFFER = "offer"
_ABOUT = "keras_het parameter service 1"
_POLL_SECONDS = 0.05


class Offers:
    """Receiver of a training's description from its leader."""

    def __init__(self, secret: bytes) -> None:
        self._gate = Gate(credential(secret, _ABOUT))
        with tf.init_scope(), tf.device("CPU:0"):
            self._text = tf.Variable("", trainable=False)

    def register_on(self, server: FunctionServer) -> None:
        """Accept offers on a server that has not started."""

        @tf.function(input_signature=[tf.TensorSpec([], tf.string)], autograph=False)
        def offer(text: tf.Tensor) -> tf.Tensor:
            self._text.assign(text)
            return tf.constant(int(Status.OK))

        server.register(OFFER, offer, self._gate)

    @property
    def is_pending(self) -> bool:
        """Whether there is a pending offer."""
        return bool(self._text.numpy())

    def take(self) -> tuple[ServiceSpec, int]:
        """Return the offered training and the index of the service that this process is to be."""
        text = self._text.numpy().decode()
        self._text.assign("")
        try:
            place, described = json.loads(text)
            return ServiceSpec.from_json(described), int(place)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"The offer of a training cannot be read. Received: {text[:200]!r} ({error}). Use "
                "the same version of keras_het on every task."
            ) from error

    def wait_at(self, address: str, is_stopped: Callable[[], bool]) -> bool:
        """Listen until there is an offer; return whether there is one."""
        if self.is_pending:
            return True
        server = FunctionServer(address)
        self.register_on(server)
        server.start()
        while not self.is_pending and not is_stopped():
            time.sleep(_POLL_SECONDS)
        server.close()
        return self.is_pending


def make_offer(
    address: str, secret: bytes, spec: ServiceSpec, place: int, timeout_seconds: float
) -> None:
    """Offer a training to a process that runs `keras-het serve`."""
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
