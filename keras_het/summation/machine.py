"""A spare machine: sums gradients, for a number of workers that changes with their roles."""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import threading
import time
from collections.abc import Sequence

import tensorflow as tf

from keras_het.rpc.admission import Gate, Status, credential, model_fingerprint
from keras_het.rpc.channel import FunctionClient, NoAnswerError
from keras_het.rpc.secret import read_secret
from keras_het.rpc.server import FunctionServer, ServerStartError
from keras_het.strategy.cluster.cluster_config import ClusterConfig, read_cluster_config
from keras_het.summation.service import SummationService, summation_credential

_logger = logging.getLogger(__name__)
_NAME = "sum_group_size"
_SPEC = tf.TensorSpec([], tf.int32)
_PATIENCE_SECONDS = 120.0
_POLL_SECONDS = 0.1


class GroupSize:
    """The number of workers, received from the leader of a restarted group."""

    def __init__(self, num_workers: int, num_spare: int) -> None:
        self._gate = Gate(_credential(num_spare))
        with tf.init_scope(), tf.device("CPU:0"):
            self._wanted = tf.Variable(num_workers, dtype=tf.int32, trainable=False)

    @property
    def wanted(self) -> int:
        return int(self._wanted)

    def register_on(self, server: FunctionServer) -> None:
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


def start_machine(
    config: ClusterConfig | None, group_size: GroupSize | None = None
) -> SummationService:
    """Start the service of a task of the job `summation`, for the workers of `group_size`."""
    if config is None or not config.is_summation_machine:
        raise ValueError(
            "This process is no summation machine. Received: "
            f"{'no TF_CONFIG' if config is None else config.task_name}. Set TF_CONFIG as on the "
            'workers, list this machine in "cluster" as job "summation", and give it "task": '
            '{"type": "summation", "index": 0}.'
        )
    num_workers = len(config.sync_group_addresses) if group_size is None else group_size.wanted
    proof = summation_credential(num_workers, len(config.summation_machines))
    service = SummationService(config.address_of(0), num_workers, proof)
    if group_size is not None:
        group_size.register_on(service.server)
    service.start()
    _logger.info("%s sums for %d workers.", config.task_name, num_workers)
    return service


def main() -> None:
    """Sum until terminated (SIGTERM, SIGINT); a restarted group may have fewer workers.

    A failed start prints one error line and exits with code 2.
    """
    try:
        _sum_until_told_to_end()
    except (ValueError, OSError, ServerStartError) as error:
        sys.stderr.write(f"[keras-het] error: {error}\n")
        sys.exit(2)


def _sum_until_told_to_end() -> None:
    config = read_cluster_config()
    group_size = None
    if config is not None and config.is_summation_machine:
        group_size = GroupSize(len(config.sync_group_addresses), len(config.summation_machines))
    service = start_machine(config, group_size)
    print(f"summation machine is ready at {service.address}", flush=True)  # noqa: T201
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    num_workers = group_size.wanted if group_size is not None else 0
    while not stop.wait(_POLL_SECONDS):
        if group_size is not None and group_size.wanted != num_workers:
            num_workers = group_size.wanted
            service.close()
            service = start_machine(config, group_size)
    service.close()
