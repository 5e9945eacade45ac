"""Calls the functions of a `FunctionServer`."""

from __future__ import annotations

import uuid
from typing import Any

import tensorflow as tf

from keras_het import private_api

_INVALID_ARGUMENT = 3


class NoAnswerError(ConnectionError):
    """No answer came in time, or an error in its place.

    Args:
        message: where from, and what came.
        code: of the error, as in `tf.errors`.
    """

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code

    @property
    def is_unknown_function(self) -> bool:
        """Whether a server did answer, and does not have the function."""
        return self.code == _INVALID_ARGUMENT and "not registered" in str(self)


class FunctionClient:
    """One connection to one server.

    Args:
        address: "host:port" of the server.
        credential: sent as every call's first argument.
        timeout_seconds: for each call.
    """

    def __init__(self, address: str, credential: bytes, timeout_seconds: float) -> None:
        self.address = address
        self.timeout_seconds = timeout_seconds
        self.credential = tf.constant(credential)
        # TensorFlow shares clients of one name, and frees them with the first of their owners.
        name = f"keras_het_{uuid.uuid4().hex}"
        self._rpc: Any = private_api.RpcClient(
            address,
            name,
            list_registered_methods=False,
            timeout_in_ms=_milliseconds(timeout_seconds),
        )

    def call(
        self, function: str, arguments: list[Any], specs: Any, timeout_seconds: Any = None
    ) -> Any:
        """Sends a call, also in a `tf.function`, and does not wait for the answer.

        Args:
            function: its name.
            arguments: after the credential.
            specs: types of the answer.
            timeout_seconds: for this call, number or tensor.

        Returns:
            TensorFlow's status-or-value, which is there when the answer is.
        """
        seconds = self.timeout_seconds if timeout_seconds is None else timeout_seconds
        return self._rpc.call(
            function,
            [self.credential, *arguments],
            output_specs=specs,
            timeout_in_ms=_milliseconds(seconds),
        )

    def ask(
        self, function: str, arguments: list[Any], specs: Any, timeout_seconds: float | None = None
    ) -> Any:
        """Sends a call as `call` does, and waits for the answer.

        Raises:
            NoAnswerError: if there is none in time.
        """
        return self.value(self.call(function, arguments, specs, timeout_seconds), timeout_seconds)

    def value(self, answer: Any, timeout_seconds: float | None = None) -> Any:
        """Waits for the answer to a `call`.

        Args:
            answer: what `call` gave.
            timeout_seconds: as it was given to `call`.

        Raises:
            NoAnswerError: if there is none in time.
        """
        if not bool(answer.is_ok()):
            seconds = self.timeout_seconds if timeout_seconds is None else timeout_seconds
            code, text = error_of(answer)
            raise NoAnswerError(
                f"{self.address} did not answer within {seconds:g} s. Received: error {code}, "
                f"{text!r}.",
                code,
            )
        return answer.get_value()


def error_of(answer: Any) -> tuple[int, str]:
    """Code and text of what came in the place of an answer."""
    code, message = answer.get_error()
    return int(code), message.numpy().decode(errors="replace")


def _milliseconds(seconds: Any) -> Any:
    if tf.is_tensor(seconds):
        return tf.cast(tf.maximum(seconds * 1000, 1), tf.int64)
    return max(1, int(seconds * 1000))
