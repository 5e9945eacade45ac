"""Sum gradients of all workers on this machine's CPU, over TensorFlow's RPC."""

from __future__ import annotations

import atexit

import tensorflow as tf

from keras_het.rpc.admission import (
    Status,
    credential,
    model_fingerprint,
    read_secret,
)
from keras_het.rpc.function_server import FunctionServer
from keras_het.rpc.gate import Gate
from keras_het.rpc.served_function import hello_function
from keras_het.summation.group_size import GroupSize
from keras_het.summation.slots import NUM_SLOTS, SlotTable


def summation_credential(num_workers: int, num_spare: int) -> bytes:
    """Return the proof of shared secret and cluster that every request carries.

    Args:
        num_workers: the number of workers.
        num_spare: the number of spare machines.

    Raises:
        ValueError: if there is no shared secret, see `admission.read_secret`.
    """
    about = model_fingerprint([], [[num_workers, num_spare]], ["float32"], "summation 1")
    return credential(read_secret(), about)


class SummationService:
    """Server of `exchange`: takes a worker's part of a vector, returns the sum over all workers.

    Sums need no announcement. A request with the wrong credential, for another run, or out of turn
    changes nothing.

    Args:
        address: "host:port" to listen on.
        num_workers: the number of workers that contribute to every sum.
        credential: the credential that every request must carry, see `summation_credential`.
        num_slots: the number of partitions that can be summed.
        group_size: announcements of the number of workers, on a spare machine.

    Reference:
        Jiang et al., "A Unified Architecture for Accelerating Distributed DNN Training in
        Heterogeneous GPU/CPU Clusters", OSDI 2020, section 3 (Summation Service).
    """

    def __init__(
        self,
        address: str,
        num_workers: int,
        credential: bytes,
        num_slots: int = NUM_SLOTS,
        group_size: GroupSize | None = None,
    ) -> None:
        self.address = address
        self._table = SlotTable(num_workers, num_slots)
        self._exchange = tf.function(
            self._table.exchange,
            experimental_attributes={"_noinline": True},  # as in SummationClient
            input_signature=[
                tf.TensorSpec([], tf.int64),
                tf.TensorSpec([], tf.int32),
                tf.TensorSpec([], tf.int32),
                tf.TensorSpec([], tf.int64),
                tf.TensorSpec([None], tf.float32),
            ],
        )
        self._server = FunctionServer(address)
        gate = Gate(credential)
        self._server.register("sum_hello", hello_function(), gate)
        self._server.register("sum_join", self._join_function(), gate)
        self._server.register("sum_exchange", self._exchange_function(), gate)
        if group_size is not None:
            group_size.register_on(self._server)

    def start(self) -> None:
        """Start answering."""
        self._server.start()
        # TensorFlow stops servers at process exit and waits until no call waits for a worker.
        atexit.register(self._table.close)

    def close(self) -> None:
        """Make the requests that wait for a worker fail, which lets the process exit."""
        atexit.unregister(self._table.close)
        self._table.close()
        self._server.close()

    def exchange_locally(
        self, run: tf.Tensor, slot: tf.Tensor, worker: tf.Tensor, step: tf.Tensor, values: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Contribute from this process, without a message.

        Args:
            run: the number of the run, int64 scalar.
            slot: int32 scalar.
            worker: this worker, int32 scalar.
            step: int64 scalar.
            values: float32 vector.

        Returns:
            `Status` as int32 scalar, and the sum.
        """
        is_ok, total = self._exchange(run, slot, worker, step, values)
        return _status(is_ok), total

    def _join_function(self) -> tf.types.experimental.PolymorphicFunction:
        @tf.function(input_signature=[tf.TensorSpec([], tf.int64)], autograph=False)
        def join(run: tf.Tensor) -> tf.Tensor:
            may_join = tf.not_equal(run, 0)
            joined = tf.cond(may_join, lambda: self._table.join(run), lambda: tf.constant(False))
            return _status(joined)

        return join

    def _exchange_function(self) -> tf.types.experimental.PolymorphicFunction:
        signature = self._exchange.input_signature

        @tf.function(input_signature=signature, autograph=False)
        def exchange(
            run: tf.Tensor, slot: tf.Tensor, worker: tf.Tensor, step: tf.Tensor, values: tf.Tensor
        ) -> tuple[tf.Tensor, tf.Tensor]:
            is_ok, total = self._exchange(run, slot, worker, step, values)
            return _status(is_ok), total

        return exchange


def _status(is_ok: tf.Tensor) -> tf.Tensor:
    return tf.where(is_ok, int(Status.OK), int(Status.REFUSED))
