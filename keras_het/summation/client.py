"""Client of one machine's summation service, for use inside a training step."""

from __future__ import annotations

import time
from collections.abc import Callable

import tensorflow as tf

from keras_het.rpc.admission import Status
from keras_het.rpc.function_client import FunctionClient, NoAnswerError

_DEADLINE_EXCEEDED = 4
_SECONDS_OF_A_CALL = 1.0
_EXCHANGE_SPECS = (tf.TensorSpec([], tf.int32), tf.TensorSpec([None], tf.float32))


class SummationClient:
    """One worker's connection to one summing machine.

    An answer waits for the slowest worker, however long that takes: a call that times out is sent
    again until the machine, or a worker, is known to be lost. A broken connection is an immediate
    error.
    """

    def __init__(
        self,
        name: str,
        address: str,
        credential: bytes,
        worker: int,
        run: int,
        is_lost: tf.Variable,
        timeout_seconds: float,
    ) -> None:
        self.name = name
        self.address = address
        self._worker = worker
        self._run = run
        self._is_lost = is_lost
        self._client = FunctionClient(address, credential, timeout_seconds)
        # One trace for all partitions. TensorFlow must not copy it into the step for each
        # partition: it would optimize all copies before the first step.
        self.exchange = tf.function(
            self._exchange,
            experimental_attributes={"_noinline": True},
            input_signature=[
                tf.TensorSpec([], tf.int32),
                tf.TensorSpec([], tf.int64),
                tf.TensorSpec([None], tf.float32),
            ],
        )

    def join(self, timeout_seconds: float, check: Callable[[], None] = lambda: None) -> None:
        """Begin the run on the machine."""
        run, spec = tf.constant(self._run, tf.int64), tf.TensorSpec([], tf.int32)
        end = time.monotonic() + timeout_seconds
        try:
            # Short calls: this thread handles nothing else in the meantime, not even Ctrl-C.
            while True:
                seconds = max(0.001, min(end - time.monotonic(), _SECONDS_OF_A_CALL))
                try:
                    status = self._client.ask("sum_join", [run], spec, seconds)
                    break
                except NoAnswerError as error:
                    if error.code != _DEADLINE_EXCEEDED or time.monotonic() >= end:
                        raise
                    check()
        except NoAnswerError as error:
            raise ConnectionError(
                f"{self.name}: {error} Start all workers, and `python -m "
                "keras_het.summation` on every machine of TF_CONFIG's job 'summation', "
                "and check that the address can be reached from here."
            ) from error
        if int(status) != Status.OK:
            raise PermissionError(
                f"{self.name} ({self.address}) refused this worker: its shared secret or its "
                "TF_CONFIG (number of workers and summation machines) differs. Use the same for "
                "all tasks."
            )

    def is_healthy(self, timeout_seconds: float) -> bool:
        """Return whether the machine answers."""
        spec = tf.TensorSpec([], tf.int32)
        call = self._client.call("sum_hello", [], spec, timeout_seconds)
        return bool(call.is_ok())

    def _exchange(
        self, slot: tf.Tensor, step: tf.Tensor, values: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Return status and sum; raise the connection's error in the graph."""
        arguments = [
            tf.constant(self._run, tf.int64),
            slot,
            tf.constant(self._worker),
            step,
            values,
        ]

        def attempt() -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            call = self._client.call("sum_exchange", arguments, _EXCHANGE_SPECS)
            code = tf.ensure_shape(call.get_error()[0], [])
            with tf.control_dependencies([code]):  # read now, not when the call was sent
                is_lost = self._is_lost.read_value()
            may_try_again = tf.equal(code, _DEADLINE_EXCEEDED) & ~is_lost
            status, total = tf.cond(
                may_try_again,
                lambda: (tf.constant(int(Status.WAIT)), tf.zeros([0])),
                call.get_value,  # raises if there is no value
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
