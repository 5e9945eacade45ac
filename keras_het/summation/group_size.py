"""Number of workers a spare machine sums for, which changes when roles are chosen again."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

import tensorflow as tf

from keras_het.rpc.admission import (
    Status,
    credential,
    model_fingerprint,
    read_secret,
)
from keras_het.rpc.function_client import FunctionClient, NoAnswerError
from keras_het.rpc.function_server import FunctionServer
from keras_het.rpc.gate import Gate

_NAME = "sum_group_size"
_SPEC = tf.TensorSpec([], tf.int32)
_POLL_SECONDS = 0.1
_PATIENCE_SECONDS = 120.0


class GroupSize:
    """The number of workers, received from the leader of a restarted group."""

    def __init__(self, num_workers: int, num_spare: int) -> None:
        self._gate = Gate(_credential(num_spare))
        with tf.init_scope(), tf.device("CPU:0"):
            self._wanted = tf.Variable(num_workers, dtype=tf.int32, trainable=False)

    @property
    def wanted(self) -> int:
        """The most recently announced number of workers."""
        return int(self._wanted)

    def register_on(self, server: FunctionServer) -> None:
        """Listen on a server that has not started."""

        @tf.function(input_signature=[_SPEC], autograph=False)
        def tell(num_workers: tf.Tensor) -> tf.Tensor:
            def take() -> tf.Tensor:
                self._wanted.assign(num_workers)
                return tf.constant(int(Status.OK))

            return tf.cond(num_workers > 1, take, lambda: tf.constant(int(Status.REFUSED)))

        server.register(_NAME, tell, self._gate)


def tell_group_size(addresses: Sequence[str], num_workers: int, proof: bytes) -> None:
    """Make spare machines sum for another number of workers, and wait until they do."""
    own = _credential(len(addresses))
    for address in addresses:
        client = FunctionClient(address, own, _PATIENCE_SECONDS)
        try:
            status = client.ask(_NAME, [tf.constant(num_workers)], _SPEC)
        except NoAnswerError as error:
            raise ConnectionError(
                f"The summation machine at {error} Its group has started again in other roles and "
                "needs it; restart it."
            ) from error
        if int(status) != Status.OK:
            raise PermissionError(
                f"The summation machine at {address} refused this group: its shared secret or its "
                "number of summation machines differs. Use the same for all tasks."
            )
    for address in addresses:
        _wait_for(address, proof)


def _wait_for(address: str, proof: bytes) -> None:
    client = FunctionClient(address, proof, 1.0)  # TensorFlow crashes if freed before its call
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(NoAnswerError):
            if int(client.ask("sum_hello", [], _SPEC)) == Status.OK:
                return
        time.sleep(_POLL_SECONDS)
    raise ConnectionError(
        f"The summation machine at {address} does not sum for the new group. Received: no answer "
        f"to it within {_PATIENCE_SECONDS:g} s. Restart the machine."
    )


def _credential(num_spare: int) -> bytes:
    """Return the credential of messages about the group, which announce its number of workers."""
    about = model_fingerprint([], [[num_spare]], ["int32"], "summation group 1")
    return credential(read_secret(), about)
