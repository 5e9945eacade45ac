"""What the choice of roles measures on this cluster: links to the leader, and exchanges."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import keras
import numpy as np

from keras_het.asynchronous.exchange.participant import ModelVectors
from keras_het.rpc.admission import Gate, credential
from keras_het.rpc.channel import FunctionClient
from keras_het.rpc.links import measure_link, send_message, serve_messages
from keras_het.rpc.secret import read_secret
from keras_het.rpc.server import FunctionServer
from keras_het.strategy.cluster.cluster_config import config_of
from keras_het.strategy.measure.compute_times import StepTimes

if TYPE_CHECKING:
    from keras_het.strategy.heterogeneous_strategy import HeterogeneousStrategy

_ABOUT = "keras_het link rates 1"
_TIMEOUT_SECONDS = 60.0
_READINGS = 15
_PARTS = 4
"""Reading, updating or reporting, claiming batches and writing: all take about equally long."""


def measure_link_rates(strategy: HeterogeneousStrategy) -> tuple[float, ...]:
    """Measure one worker's link to the leader after another; all workers must call it.

    The leader's own link is assumed to be as fast as the fastest of the others.
    """
    proof = credential(read_secret(), _ABOUT)
    address = config_of(strategy).service_address()
    server, rate = None, 0.0
    if strategy.is_chief:
        server = FunctionServer(address)
        serve_messages(server, Gate(proof))
        server.start()
    for worker in range(strategy.num_workers):
        strategy.extended.gather_over_workers(np.zeros([1]))  # one at a time, after the server
        if worker == strategy.worker_index and not strategy.is_chief:
            client = FunctionClient(address, proof, _TIMEOUT_SECONDS)
            rate = measure_link(functools.partial(send_message, client)).bytes_per_second
    everyone = strategy.extended.gather_over_workers(np.array([rate]))
    if server is not None:
        server.close()
    return tuple(float(own) if own > 0 else float(everyone.max()) for own in everyone)


class ExchangeTimes(NamedTuple):
    """The cost of an exchange besides the travel time of its bytes."""

    all_reduce_seconds: float
    busy_seconds: float


def measure_exchange(
    model: keras.Model,
    strategy: HeterogeneousStrategy,
    partition_size: int,
    steps: Sequence[StepTimes],
    clock: Callable[[], float] = time.perf_counter,
) -> ExchangeTimes:
    """Measure weight reads and collectives; all workers must call it.

    An all-reduce on an otherwise idle cluster would say too little: training tasks do other work
    besides forwarding its messages.

    Nothing is written: weights of 64 bits would lose some of them.
    """
    weights = ModelVectors(model, strategy, partition_size).weights
    readings = []
    for _ in range(1 + _READINGS):
        began = clock()
        for part in weights.read():
            part.numpy()
        readings.append(clock() - began)
    busy = _PARTS * statistics.median(readings[1:])  # the first one is traced
    local = strategy.layout.local_replicas
    own = np.array([[*(waited(step, local) for step in steps), busy]])
    found = strategy.extended.gather_over_workers(own)
    # The worker that computes longest waits for no other.
    return ExchangeTimes(float(np.median(found[:, :-1].min(axis=0))), float(found[0, -1]))


def waited(step: StepTimes, local: range) -> float:
    """Return the seconds from this worker's last gradients to the end of the collective."""
    seconds = step.seconds[local.start : local.stop]
    return float(step.collective_seconds - (seconds.max() - seconds[0]))
