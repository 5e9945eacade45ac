"""Speed of the link between two processes: one measurement for doctor, roles and pipelines."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from keras_het.exchange.client import Client
from keras_het.exchange.message import Kind, Message, Vector
from keras_het.exchange.server import Server

PROBES = "links"
"""Name of the service that `serve_probes` adds."""
_SMALL, _LARGE = 256, 1 << 18
_TIMES = 5
_ANSWER_SECONDS = 60.0


class LinkSpeed(NamedTuple):
    """How long a message travels."""

    latency_seconds: float
    bytes_per_second: float


def measure_link(
    exchange: Callable[[Vector], object],
    comes_back: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> LinkSpeed:
    """Time small and large messages to whoever answers, with the vector itself if it comes back."""
    small, large = (
        _seconds(exchange, np.zeros(size, np.float32), clock) for size in (_SMALL, _LARGE)
    )
    of_large = (large - small) / (2 if comes_back else 1)
    return LinkSpeed(small / 2, 4 * (_LARGE - _SMALL) / max(of_large, 1e-9))


def _seconds(
    exchange: Callable[[Vector], object], vector: Vector, clock: Callable[[], float]
) -> float:
    exchange(vector)  # connects, and traces
    times = []
    for _ in range(_TIMES):
        begin = clock()
        exchange(vector)
        times.append(clock() - begin)
    # other traffic can only add
    return min(statistics.median(times), min(times) * 1.5)


def serve_probes(server: Server, credential: bytes) -> None:
    """Let a server take the messages of `send_probe`."""
    server.serve(PROBES, credential, take_probe)


def take_probe(sender: int, request: Message) -> Message:
    """Answer a probe, and do nothing with it."""
    if request.kind is not Kind.PROBE:
        raise ValueError(f"Received: {request.kind.name}; expected: PROBE.")
    return Message(Kind.DONE)


def send_probe(client: Client, vector: Vector) -> None:
    """Send a vector to a server that takes probes, and wait for its answer."""
    client.ask(Message(Kind.PROBE, (), (vector,)), _ANSWER_SECONDS)
