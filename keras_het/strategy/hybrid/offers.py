"""How a process that knows no model yet learns what it is to serve."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_het import private_api
from keras_het.strategy.hybrid.service_spec import ServiceSpec
from keras_het.strategy.parameter_service import Status, credential
from keras_het.strategy.parameter_service.function_server import FunctionServer
from keras_het.strategy.parameter_service.gate import Gate

OFFER = "offer"
_ABOUT = "keras_het parameter service 1"
_POLL_SECONDS = 0.05


class Offers:
    """Takes the description of a training from its leader.

    Args:
        secret: shared by all tasks.
    """

    def __init__(self, secret: bytes) -> None:
        self._gate = Gate(credential(secret, _ABOUT))
        with tf.init_scope(), tf.device("CPU:0"):
            self._text = tf.Variable("", trainable=False)

    def register_on(self, server: FunctionServer) -> None:
        """Takes offers on a server that has not started.

        Args:
            server: where it listens.
        """

        @tf.function(input_signature=[tf.TensorSpec([], tf.string), tf.TensorSpec([], tf.string)])
        def offer(proof: Any, text: Any) -> Any:
            def take() -> Any:
                self._text.assign(text)
                return tf.constant(int(Status.OK))

            return tf.cond(self._gate.admits(proof), take, lambda: tf.constant(int(Status.REFUSED)))

        server.register(OFFER, offer)

    @property
    def is_pending(self) -> bool:
        """Whether there is an offer that was not taken."""
        return bool(self._text.numpy())

    def take(self) -> tuple[ServiceSpec, int]:
        """The training, and which of its services this process is to be.

        Raises:
            ValueError: if the offer cannot be read.
        """
        text = self._text.numpy().decode()
        self._text.assign("")
        place, described = json.loads(text)
        return ServiceSpec.from_json(described), int(place)

    def wait_at(self, address: str, is_stopped: Callable[[], bool]) -> bool:
        """Listens until there is an offer; whether there is one.

        Args:
            address: "host:port" to listen on.
            is_stopped: whether to give up.
        """
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
    """Offers a training to a process that runs `keras-het serve`.

    Args:
        address: where it listens.
        secret: shared by all tasks.
        spec: the training.
        place: which of the services it is to be.
        timeout_seconds: for the message.

    Raises:
        ConnectionError: if nobody answers.
        PermissionError: if the secret is not its.
    """
    name = f"keras_het_{uuid.uuid4().hex}"
    milliseconds = int(timeout_seconds * 1000)
    rpc = private_api.RpcClient(
        address, name, list_registered_methods=False, timeout_in_ms=milliseconds
    )
    text = json.dumps([place, spec.to_json()])
    answer = rpc.call(
        OFFER,
        [tf.constant(credential(secret, _ABOUT)), tf.constant(text)],
        output_specs=tf.TensorSpec([], tf.int32),
        timeout_in_ms=milliseconds,
    )
    if not bool(answer.is_ok()):
        code, message = answer.get_error()
        raise ConnectionError(
            f"No parameter service answered at {address} within {timeout_seconds:g} s. Received: "
            f"error {int(code)}, {message.numpy().decode(errors='replace')!r}. Start `keras-het "
            "serve` on that machine, with the same TF_CONFIG and secret."
        )
    if int(answer.get_value()) != Status.OK:
        raise PermissionError(
            f"The parameter service at {address} refused this training: its shared secret differs. "
            "Use the same secret on every task."
        )
