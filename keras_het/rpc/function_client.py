"""Client for the functions of a `FunctionServer`."""

from __future__ import annotations

import time
import uuid

import tensorflow as tf

from keras_het import private_api
from keras_het.rpc.admission import Status
from keras_het.rpc.function_server import CLOCK
from keras_het.rpc.gate import LONGEST_AGE_SECONDS, token
from keras_het.value_types import Nest

_INVALID_ARGUMENT = 3


class NoAnswerError(ConnectionError):
    """No answer arrived in time, or an error arrived instead."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code

    @property
    def is_unknown_function(self) -> bool:
        """Whether a server answered but does not have the function."""
        return self.code == _INVALID_ARGUMENT and "not registered" in str(self)


class FunctionClient:
    """One connection to one server."""

    def __init__(self, address: str, credential: bytes, timeout_seconds: float) -> None:
        self.address = address
        self.timeout_seconds = timeout_seconds
        self.credential = credential
        self._clock_ahead = 0.0
        # TensorFlow shares clients of the same name and frees them with the first of their owners.
        name = f"keras_het_{uuid.uuid4().hex}"
        self._rpc = private_api.RpcClient(
            address,
            name,
            list_registered_methods=False,
            timeout_in_ms=_milliseconds(timeout_seconds),
        )

    def call(
        self,
        function: str,
        arguments: list[tf.Tensor],
        specs: Nest,
        timeout_seconds: tf.Tensor | float | None = None,
    ) -> private_api.RpcAnswer:
        """Send a call without waiting for the answer; works in a `tf.function` too."""
        seconds = self.timeout_seconds if timeout_seconds is None else timeout_seconds
        with tf.device("CPU:0"):
            proof = token(self.credential, function, tf.timestamp() + self._clock_ahead)
        return self._rpc.call(
            function,
            [proof, *arguments],
            output_specs=specs,
            timeout_in_ms=_milliseconds(seconds),
        )

    def ask(
        self,
        function: str,
        arguments: list[tf.Tensor],
        specs: Nest,
        timeout_seconds: float | None = None,
    ) -> Nest:
        """Send a call like `call` and wait for the answer.

        If the server refuses because its clock differs, later calls use the server's time.
        """
        answer = self.value(self.call(function, arguments, specs, timeout_seconds), timeout_seconds)
        if _is_refused(answer) and self._has_set_clock():
            call = self.call(function, arguments, specs, timeout_seconds)
            answer = self.value(call, timeout_seconds)
        return answer

    def _has_set_clock(self) -> bool:
        """Ask for the server's time; return whether it differs from the known one."""
        call = self._rpc.call(CLOCK, [], output_specs=tf.TensorSpec([], tf.float64))
        ahead = float(self.value(call)) - time.time()
        is_other = abs(ahead - self._clock_ahead) > LONGEST_AGE_SECONDS / 2
        self._clock_ahead = ahead if is_other else self._clock_ahead
        return is_other

    def value(self, answer: private_api.RpcAnswer, timeout_seconds: float | None = None) -> Nest:
        """Wait for the answer to a `call`."""
        if not bool(answer.is_ok()):
            seconds = self.timeout_seconds if timeout_seconds is None else timeout_seconds
            code, text = error_of(answer)
            raise NoAnswerError(
                f"{self.address} did not answer within {seconds:g} s. Received: error {code}, "
                f"{text!r}.",
                code,
            )
        return answer.get_value()


def error_of(answer: private_api.RpcAnswer) -> tuple[int, str]:
    """Return the code and text of the error that arrived instead of an answer."""
    code, message = answer.get_error()
    return int(code), message.numpy().decode(errors="replace")


def _is_refused(answer: Nest) -> bool:
    return int(tf.nest.flatten(answer)[0]) == Status.REFUSED


def _milliseconds(seconds: tf.Tensor | float) -> tf.Tensor | int:
    if tf.is_tensor(seconds):
        return tf.cast(tf.maximum(seconds * 1000, 1), tf.int64)
    return max(1, int(seconds * 1000))
