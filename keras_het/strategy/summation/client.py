"""Talks to one machine's summation service from inside a training step."""

from __future__ import annotations

import uuid
from typing import Any

import tensorflow as tf

from keras_het import private_api
from keras_het.strategy.parameter_service.admission import Status

_DEADLINE_EXCEEDED = 4
_EXCHANGE_SPECS = (tf.TensorSpec([], tf.int32), tf.TensorSpec([None], tf.float32))


class SummationClient:
    """One worker's connection to one summing machine.

    An answer waits for the slowest worker, however long that takes: a call that times out is sent
    again until the machine, or a worker, is known to be lost. A connection that breaks is an error
    at once.

    Args:
        name: of the machine, for messages, such as "summation 0".
        address: "host:port" of its service.
        credential: as the service has it.
        worker: this worker.
        run: number of the run.
        is_lost: bool variable, set once another process is known to be lost.
        timeout_seconds: of each call.
    """

    def __init__(
        self,
        name: str,
        address: str,
        credential: bytes,
        worker: int,
        run: int,
        is_lost: Any,
        timeout_seconds: float,
    ) -> None:
        self.name = name
        self.address = address
        self._credential = tf.constant(credential)
        self._worker = worker
        self._run = run
        self._is_lost = is_lost
        self._timeout_seconds = timeout_seconds
        # TensorFlow shares clients of one name, and frees them with the first of their owners.
        self._rpc = private_api.RpcClient(
            address,
            f"keras_het_{uuid.uuid4().hex}",
            list_registered_methods=False,
            timeout_in_ms=int(timeout_seconds * 1000),
        )
        # One trace for all partitions.
        self.exchange = tf.function(
            self._exchange,
            input_signature=[
                tf.TensorSpec([], tf.int32),
                tf.TensorSpec([], tf.int64),
                tf.TensorSpec([None], tf.float32),
            ],
        )

    def join(self, timeout_seconds: float) -> None:
        """Begins the run there.

        Args:
            timeout_seconds: how long to wait for the machine to be started.

        Raises:
            ConnectionError: if it does not answer in time.
            PermissionError: if it refuses.
        """
        call = self._call("sum_join", [self._credential, tf.constant(self._run, tf.int64)],
                          tf.TensorSpec([], tf.int32), timeout_seconds)  # fmt: skip
        if not bool(call.is_ok()):
            code, message = call.get_error()
            raise ConnectionError(
                f"{self.name} ({self.address}) did not answer within {timeout_seconds:g} s. "
                f"Received: error {int(code)}, {message.numpy().decode(errors='replace')!r}. Start "
                "all workers, and `python -m keras_het.strategy.summation` on every machine of "
                "TF_CONFIG's job 'summation', and check that the address can be reached from here."
            )
        if int(call.get_value()) != Status.OK:
            raise PermissionError(
                f"{self.name} ({self.address}) refused this worker: its shared secret or its "
                "TF_CONFIG (number of workers and summation machines) differs. Use the same for "
                "all tasks."
            )

    def is_healthy(self, timeout_seconds: float) -> bool:
        """Whether the machine answers.

        Args:
            timeout_seconds: how long to wait for it.
        """
        spec = tf.TensorSpec([], tf.int32)
        call = self._call("sum_hello", [self._credential], spec, timeout_seconds)
        return bool(call.is_ok())

    def _call(self, method: str, arguments: list[Any], specs: Any, timeout_seconds: float) -> Any:
        milliseconds = max(1, int(timeout_seconds * 1000))
        return self._rpc.call(method, arguments, output_specs=specs, timeout_in_ms=milliseconds)

    def _exchange(self, slot: Any, step: Any, values: Any) -> Any:
        """Status and sum; raises in the graph what the connection raised."""
        arguments = [
            self._credential,
            tf.constant(self._run, tf.int64),
            slot,
            tf.constant(self._worker),
            step,
            values,
        ]

        def attempt() -> tuple[Any, Any, Any]:
            call = self._call("sum_exchange", arguments, _EXCHANGE_SPECS, self._timeout_seconds)
            code = tf.ensure_shape(call.get_error()[0], [])
            may_try_again = tf.equal(code, _DEADLINE_EXCEEDED) & ~self._is_lost.read_value()
            status, total = tf.cond(
                may_try_again,
                lambda: (tf.constant(int(Status.WAIT)), tf.zeros([0])),
                call.get_value,  # raises if there is none
            )
            return may_try_again, tf.ensure_shape(status, []), tf.ensure_shape(total, [None])

        _, status, total = tf.while_loop(
            lambda again, status, total: again,
            lambda again, status, total: attempt(),
            attempt(),
            shape_invariants=(
                tf.TensorShape([]),
                tf.TensorShape([]),
                tf.TensorShape([None]),
            ),
        )
        return status, total
