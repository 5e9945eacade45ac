"""The channel to the functions of a `FunctionServer`: over RPC, or within this process."""

from __future__ import annotations

import abc
import time
import uuid
from typing import NamedTuple, Protocol

import tensorflow as tf

from keras_het import private_api
from keras_het.rpc.admission import LONGEST_AGE_SECONDS, Status, token
from keras_het.rpc.server import CLOCK, FunctionServer
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


class Call(Protocol):
    """A call whose answer may be in flight; its methods wait for it, in a graph too."""

    def is_ok(self) -> tf.Tensor:
        """Return whether there is an answer."""

    def get_value(self) -> Nest:
        """Return the answer."""

    def get_error(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Return code and text of the error that arrived instead."""


class Channel(abc.ABC):
    """One connection to the functions of one server."""

    address: str
    timeout_seconds: float
    answers_at_once = False

    @abc.abstractmethod
    def call(
        self,
        function: str,
        arguments: list[tf.Tensor],
        specs: Nest,
        timeout_seconds: tf.Tensor | float | None = None,
    ) -> Call:
        """Call a function without waiting for the answer; works in a `tf.function` too."""

    def ask(
        self,
        function: str,
        arguments: list[tf.Tensor],
        specs: Nest,
        timeout_seconds: float | None = None,
    ) -> Nest:
        """Call a function and wait for the answer."""
        return self.value(self.call(function, arguments, specs, timeout_seconds), timeout_seconds)

    def value(self, answer: Call, timeout_seconds: float | None = None) -> Nest:
        """Wait for the answer to a `call`; raise `NoAnswerError` without one."""
        return answer.get_value()


class FunctionClient(Channel):
    """The channel to a server of another process."""

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
    ) -> Call:
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
        """Call a function and wait; a server with another clock is asked again by its time."""
        answer = super().ask(function, arguments, specs, timeout_seconds)
        is_refused = int(tf.nest.flatten(answer)[0]) == Status.REFUSED
        if is_refused and self._has_set_clock():
            answer = super().ask(function, arguments, specs, timeout_seconds)
        return answer

    def _has_set_clock(self) -> bool:
        """Ask for the server's time; return whether it differs from the known one."""
        call = self._rpc.call(CLOCK, [], output_specs=tf.TensorSpec([], tf.float64))
        ahead = float(self.value(call)) - time.time()
        is_other = abs(ahead - self._clock_ahead) > LONGEST_AGE_SECONDS / 2
        self._clock_ahead = ahead if is_other else self._clock_ahead
        return is_other

    def value(self, answer: Call, timeout_seconds: float | None = None) -> Nest:
        if not bool(answer.is_ok()):
            seconds = self.timeout_seconds if timeout_seconds is None else timeout_seconds
            code, text = error_of(answer)
            raise NoAnswerError(
                f"{self.address} did not answer within {seconds:g} s. Received: error {code}, "
                f"{text!r}.",
                code,
            )
        return answer.get_value()


class _Result(NamedTuple):
    value: Nest

    def is_ok(self) -> tf.Tensor:
        return tf.constant(True)

    def get_value(self) -> Nest:
        return self.value

    def get_error(self) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.constant(0), tf.constant("")


class LocalChannel(Channel):
    """The channel to a server of this process: a call runs the function, without a message."""

    answers_at_once = True
    timeout_seconds = 10.0

    def __init__(self, server: FunctionServer) -> None:
        self.address = server.address
        made = {name: make() for name, make in server.local_functions.items()}
        self._functions = {**server.functions, **made}
        # Concrete: TensorFlow mistakes several functions with the same code for one being retraced.
        self._traced = {name: own.get_concrete_function() for name, own in made.items()}

    def call(
        self,
        function: str,
        arguments: list[tf.Tensor],
        specs: Nest,
        timeout_seconds: tf.Tensor | float | None = None,
    ) -> Call:
        with tf.device("CPU:0"):
            if function not in self._traced:
                self._traced[function] = self._functions[function].get_concrete_function()
            return _Result(self._traced[function](*arguments))


def error_of(answer: Call) -> tuple[int, str]:
    code, message = answer.get_error()
    return int(code), message.numpy().decode(errors="replace")


def _milliseconds(seconds: tf.Tensor | float) -> tf.Tensor | int:
    if tf.is_tensor(seconds):
        return tf.cast(tf.maximum(seconds * 1000, 1), tf.int64)
    return max(1, int(seconds * 1000))
