"""Measure each worker's link to the leader with the messages of a parameter service."""

from __future__ import annotations

import statistics
import time

import numpy as np
import tensorflow as tf

from keras_het.asynchronous.parameter_service import Status, credential
from keras_het.rpc.admission import read_secret
from keras_het.rpc.function_client import FunctionClient
from keras_het.rpc.function_server import FunctionServer
from keras_het.rpc.gate import Gate
from keras_het.strategy.cluster.cluster_config import config_of
from keras_het.training_strategy import TrainingStrategy

_ABOUT = "keras_het link rates 1"
_MESSAGE_BYTES = 1 << 20
_MESSAGES = 3
_TIMEOUT_SECONDS = 60.0


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
