"""Speed of the link between two processes: one measurement for doctor, roles and pipelines."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from keras_het.rpc.admission import Gate, Status
from keras_het.rpc.channel import FunctionClient
from keras_het.rpc.server import FunctionServer

TAKE = "take"
"""Function that takes a message, and does nothing with it."""
_SMALL, _LARGE = 256, 1 << 18
_TIMES = 5
_ANSWER = tf.TensorSpec([], tf.int32)


class LinkSpeed(NamedTuple):
    """How long a message travels."""

    latency_seconds: float
    bytes_per_second: float


def measure_link(
    exchange: Callable[[tf.Tensor], object],
    comes_back: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> LinkSpeed:
    """Time small and large messages, float32 as training sends them.

    Args:
        exchange: sends a message, and returns once the other process has answered.
        comes_back: whether the answer is the message itself.
        clock: seconds.
    """
    small, large = (_seconds(exchange, tf.zeros([size]), clock) for size in (_SMALL, _LARGE))
    of_large = (large - small) / (2 if comes_back else 1)
    return LinkSpeed(small / 2, 4 * (_LARGE - _SMALL) / max(of_large, 1e-9))


def _seconds(
    exchange: Callable[[tf.Tensor], object], message: tf.Tensor, clock: Callable[[], float]
) -> float:
    exchange(message)  # connects, and traces
    times = []
    for _ in range(_TIMES):
        begin = clock()
        exchange(message)
        times.append(clock() - begin)
    # other traffic can only add
    return min(statistics.median(times), min(times) * 1.5)


def serve_messages(server: FunctionServer, gate: Gate) -> None:
    """Let a server take the messages of `send_message`."""

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)], autograph=False)
    def take(message: tf.Tensor) -> tf.Tensor:
        return tf.constant(int(Status.OK)) + 0 * tf.size(message)

    server.register(TAKE, take, gate)


def send_message(client: FunctionClient, message: tf.Tensor) -> None:
    """Send a message to a server with `serve_messages`, and wait for its answer.

    Raises:
        PermissionError: if the server has another secret.
    """
    if int(client.ask(TAKE, [message], _ANSWER)) != Status.OK:
        raise PermissionError(
            f"{client.address} refused this process: its shared secret differs. Use the same "
            "secret on every task."
        )
