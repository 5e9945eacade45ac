"""Server of `tf.function`s over TensorFlow's RPC, and the checks before any of them runs."""

from __future__ import annotations

import atexit
import errno
import gc
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

import tensorflow as tf

from keras_het import private_api
from keras_het.rpc.admission import Gate, Status
from keras_het.value_types import Nest

CLOCK = "clock"
"""Function that returns the server's time to any caller, float64 seconds since 1970."""
TfFunction: TypeAlias = tf.types.experimental.PolymorphicFunction
"""What `tf.function` returns."""
_TOKEN = tf.TensorSpec([], tf.string)
_LONGEST_START_SECONDS = 60.0
_LONGEST_END_SECONDS = 5.0
_POLL_SECONDS = 0.005


class ServerStartError(RuntimeError):
    """A server cannot listen on its address."""


class FunctionServer:
    """One RPC server with the functions registered before its start.

    TensorFlow runs a server's functions with the resources of the call that registered them, and
    frees those when its kernel cache is cleared (`keras.backend.clear_session`), unless the call is
    still running. That call therefore runs as long as the server, in a thread.
    """

    def __init__(self, address: str) -> None:
        # TensorFlow has one server per address: closing this one would close the other too.
        _check_nobody_listens(address)
        self.address = address
        self._methods: dict[str, TfFunction] = {}
        self.functions: dict[str, TfFunction] = {}
        self.local_functions: dict[str, Callable[[], TfFunction]] = {}
        with tf.init_scope(), tf.device("CPU:0"):
            self._server = private_api.RpcServer(address)
            self._end = tf.queue.FIFOQueue(1, tf.bool, shapes=[])
            self._is_started = tf.Variable(False, trainable=False)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name="keras_het-server", daemon=True)

    def register(
        self,
        name: str,
        function: TfFunction,
        gate: Gate,
        refused: Callable[[], tf.Tensor] | None = None,
    ) -> None:
        """Add a function; only before `start`."""
        self.functions[name] = function
        self._methods[name] = served_function(name, function, gate, refused)

    def register_locally(self, name: str, make: Callable[[], TfFunction]) -> None:
        """Give a `LocalChannel` another function of this name, made and traced if there is one."""
        self.local_functions[name] = make

    def start(self) -> None:
        """Start answering; return once the server does."""
        try:
            self._start()
        except ServerStartError:
            self.close()
            raise
        _listening.append(self)

    def _start(self) -> None:
        _check_nobody_listens(self.address)
        self._thread.start()
        deadline = time.monotonic() + _LONGEST_START_SECONDS
        while not self._listens() and time.monotonic() < deadline:
            if not self._thread.is_alive():
                break
            time.sleep(_POLL_SECONDS)
        if not self._listens():
            raise ServerStartError(
                f"The server at {self.address} did not start. Received: {self._error!r}. Check "
                "that the address is one of this machine and its port free."
            )

    def _listens(self) -> bool:
        # The variable may be set slightly earlier: it is a separate resource from the server.
        if not self._thread.is_alive() or not bool(self._is_started):
            return False
        host, _, port = self.address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=1.0).close()
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Stop answering and release the port, after the calls in progress finish."""
        _close([self])

    def _leave(self) -> None:
        self._server = self._error = None

    def _end_serving(self) -> None:
        self._end.close(cancel_pending_enqueues=True)
        if self._thread.ident is not None:
            self._thread.join(_LONGEST_END_SECONDS)
        self._methods.clear()

    def _serve(self) -> None:
        @tf.function
        def serve() -> tf.Tensor:
            for name, function in self._methods.items():
                self._server.register(name, function)
            self._server.register(CLOCK, _clock)
            self._server.start()
            self._is_started.assign(True)
            return self._end.dequeue()

        try:
            serve()
        except (tf.errors.OutOfRangeError, tf.errors.CancelledError):
            pass  # closed
        except Exception as error:
            self._error = error


@tf.function(input_signature=[])
def _clock() -> tf.Tensor:
    return tf.timestamp()


_listening: list[FunctionServer] = []


def _close(servers: list[FunctionServer]) -> None:
    # TensorFlow closes a server with the last reference to it. The serving call must outlive that:
    # calls in progress use its resources.
    for server in servers:
        server._leave()
    gc.collect()
    for server in servers:
        server._end_serving()
        if server in _listening:
            _listening.remove(server)


@atexit.register
def _close_all() -> None:
    """At process exit: calls in progress would use freed resources."""
    _close(list(_listening))


def _check_nobody_listens(address: str) -> None:
    """Check explicitly: TensorFlow's servers share a port, and each gets some of the calls."""
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ignore closed connections
        try:
            probe.bind((host, int(port)))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ServerStartError(
                    f"The server at {address} did not start: somebody listens there. Close the one "
                    "of this process, end the one that an earlier run has left, or give another "
                    "port."
                ) from error


def served_function(
    name: str,
    function: TfFunction,
    gate: Gate,
    refused: Callable[[], tf.Tensor] | None = None,
) -> TfFunction:
    """Wrap a function for untrusted callers: no part of a request is used before admission.

    TensorFlow checks the number and types of the arguments but trusts their shapes. Here the shapes
    are unknown to the graph, because its optimizer would drop a check that holds by declaration.
    """
    specs = [_TOKEN, *function.input_signature]

    @tf.function(input_signature=[tf.TensorSpec(None, s.dtype) for s in specs], autograph=False)
    def serve(*arguments: tf.Tensor) -> Nest:
        def run() -> Nest:
            pairs = zip(arguments[1:], specs[1:], strict=True)
            # In this graph: calls of a separate graph would cost time.
            given = [tf.ensure_shape(values, spec.shape) for values, spec in pairs]
            return function.python_function(*given)

        text = tf.concat([tf.reshape(arguments[0], [-1]), [""]], axis=0)[0]
        is_admitted = _have_shapes(arguments, specs) & gate.admits(text, name)
        return answer_if(is_admitted, run, refused or Status.REFUSED)

    return serve


def hello_function() -> TfFunction:
    @tf.function(input_signature=[], autograph=False)
    def hello() -> tf.Tensor:
        return tf.constant(int(Status.OK))

    return hello


def answer_if(
    holds: tf.Tensor,
    run: Callable[[], Nest],
    otherwise: Status | Callable[[], tf.Tensor] = Status.REFUSED,
) -> Nest:
    """Return a function's outputs if a condition holds, else a status and zeros; in the graph."""
    outputs: Nest = None

    def note() -> Nest:
        nonlocal outputs
        outputs = run()
        return outputs

    def refuse() -> Nest:  # traced after the other branch
        status = otherwise() if callable(otherwise) else tf.constant(int(otherwise))
        empty = []
        for output in tf.nest.flatten(outputs)[1:]:
            shape = [0] if output.shape.rank is None else [size or 0 for size in output.shape]
            empty.append(tf.zeros(shape, output.dtype))
        return tf.nest.pack_sequence_as(outputs, [status, *empty])

    return tf.cond(holds, note, refuse)


def _have_shapes(tensors: Sequence[tf.Tensor], specs: Sequence[tf.TensorSpec]) -> tf.Tensor:
    ranks = [spec.shape.rank for spec in specs]
    hold = tf.reduce_all(tf.equal(tf.stack([tf.rank(given) for given in tensors]), ranks))
    for given, spec in zip(tensors, specs, strict=True):
        expected = [-1 if size is None else size for size in spec.shape]
        if set(expected) - {-1}:
            # As many numbers as expected, whatever the rank is.
            unknown = tf.fill([len(expected)], tf.constant(-1, tf.int64))
            sizes = tf.concat([tf.shape(given, tf.int64), unknown], axis=0)[: len(expected)]
            is_free = tf.equal(expected, -1)
            hold &= tf.reduce_all(is_free | tf.equal(sizes, tf.constant(expected, tf.int64)))
    return hold
