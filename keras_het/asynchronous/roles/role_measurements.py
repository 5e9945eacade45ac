"""What `roles="auto"` measures beside steps: each worker's link, and the cost of an exchange."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_het.asynchronous.exchange.model_vectors import ModelVectors
from keras_het.asynchronous.parameter_service import Status, credential
from keras_het.rpc.admission import read_secret
from keras_het.rpc.function_client import FunctionClient
from keras_het.rpc.function_server import FunctionServer
from keras_het.rpc.gate import Gate
from keras_het.strategy.cluster.cluster_config import config_of
from keras_het.strategy.measure.compute_times import StepTimes
from keras_het.training_strategy import TrainingStrategy

_ABOUT = "keras_het link rates 1"
_MESSAGE_BYTES = 1 << 20
_MESSAGES = 3
_TIMEOUT_SECONDS = 60.0
_TIMES = 15
_PARTS = 4
"""Reading, updating or reporting, claiming batches and writing: all take about equally long."""


class ExchangeTimes(NamedTuple):
    """The cost of an exchange besides the travel time of its bytes."""

    all_reduce_seconds: float
    busy_seconds: float


def measure_exchange(
    model: keras.Model, strategy: TrainingStrategy, partition_size: int, steps: Sequence[StepTimes]
) -> ExchangeTimes:
    """Measure weight reads and collectives; all workers must call it.

    An all-reduce on an otherwise idle cluster would say too little: training tasks do other work
    besides forwarding its messages.

    Nothing is written: weights of 64 bits would lose some of them.
    """
    weights = ModelVectors(model, strategy, partition_size).weights
    readings = _seconds_of(lambda: [part.numpy() for part in weights.read()])
    busy = _PARTS * statistics.median(readings)
    own = np.array([[*(_waited(step, strategy.layout.local_replicas) for step in steps), busy]])
    found = strategy.extended.gather_over_workers(own)
    # The worker that computes longest waits for no other.
    return ExchangeTimes(float(np.median(found[:, :-1].min(axis=0))), float(found[0, -1]))


def _waited(step: StepTimes, local: range) -> float:
    """Return the seconds from this worker's last gradients to the end of the collective."""
    seconds = step.seconds[local.start : local.stop]
    return float(step.collective_seconds - (seconds.max() - seconds[0]))


def _seconds_of(run: Callable[[], Any]) -> list[float]:
    """Return the times of several runs; the first one, which is traced, does not count."""
    times = []
    for _ in range(1 + _TIMES):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return times[1:]


def measure_link_rates(strategy: TrainingStrategy) -> tuple[float, ...]:
    """Measure one worker after another; all workers of the sync group must call it.

    The leader's own link is assumed to be as fast as the fastest of the others.
    """
    proof = credential(read_secret(), _ABOUT)
    address = config_of(strategy).service_address()
    server = _start_server(address, proof) if strategy.is_chief else None
    seconds = 0.0
    for worker in range(strategy.num_workers):
        strategy.extended.gather_over_workers(np.zeros([1]))  # one at a time, after the server
        if worker == strategy.worker_index and not strategy.is_chief:
            seconds = _measure(address, proof)
    everyone = strategy.extended.gather_over_workers(np.array([seconds]))
    if server is not None:
        server.close()
    fastest = min(s for s in everyone if s > 0)
    return tuple(_MESSAGE_BYTES / (s if s > 0 else fastest) for s in map(float, everyone))


def _start_server(address: str, proof: bytes) -> FunctionServer:
    gate, server = Gate(proof), FunctionServer(address)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)], autograph=False)
    def absorb(values: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.constant(int(Status.OK)), values[:1]

    server.register("absorb", absorb, gate)
    server.start()
    return server


def _measure(address: str, proof: bytes) -> float:
    """Return the median time of a message in seconds, without the first one, which connects."""
    client = FunctionClient(address, proof, _TIMEOUT_SECONDS)
    values = tf.zeros([_MESSAGE_BYTES // 4])
    specs = (tf.TensorSpec([], tf.int32), tf.TensorSpec([None], tf.float32))
    times = []
    for _ in range(1 + _MESSAGES):
        began = time.perf_counter()
        status, _ = client.ask("absorb", [values], specs)
        if int(status) != Status.OK:
            raise PermissionError(
                f"The leader at {address} refused this worker: its shared secret differs. Use the "
                "same secret on every task."
            )
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])
