"""What sums gradients on a CPU; a spare machine does, for a number of workers that may change."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Sequence

from keras_het.exchange.client import Client
from keras_het.exchange.links import serve_probes
from keras_het.exchange.message import Kind, Message
from keras_het.exchange.secret import credential, model_fingerprint, read_secret
from keras_het.exchange.server import Server
from keras_het.exchange.sums import Sums
from keras_het.strategy.cluster.cluster_config import ClusterConfig, read_cluster_config

_logger = logging.getLogger(__name__)
SERVICE = "sums"
_GROUP = "group"
_PATIENCE_SECONDS = 120.0


def summation_credential(num_workers: int, num_spare: int) -> bytes:
    """Return the proof of shared secret and cluster that every connection shows."""
    about = model_fingerprint([], [[num_workers, num_spare]], ["float32"], "summation 1")
    return credential(read_secret(), about)


class SummationService:
    """Takes a worker's part of a vector, and answers with the sum over all workers."""

    def __init__(self, address: str, num_workers: int, credential: bytes) -> None:
        self.server = Server(address)
        self.address = self.server.address
        self.sum_for(num_workers, credential)

    def sum_for(self, num_workers: int, credential: bytes) -> None:
        """Sum for so many workers from now on; forget what others have contributed."""
        self.sums = Sums(num_workers)
        self.server.serve(SERVICE, credential, self.sums.handle)
        serve_probes(self.server, credential)

    def start(self) -> None:
        """Start answering."""
        self.server.start()

    def close(self) -> None:
        """Stop answering; requests that wait for a worker fail."""
        self.server.close()


def tell_group_size(addresses: Sequence[str], num_workers: int) -> None:
    """Make spare machines sum for another number of workers, and wait until they do."""
    for address in addresses:
        client = Client(address, _GROUP, _credential(len(addresses)))
        try:
            client.ask(Message(Kind.GROUP_SIZE, (num_workers,)), _PATIENCE_SECONDS)
        except (ConnectionError, TimeoutError) as error:
            raise ConnectionError(
                f"The summation machine at {error} Its group has started again in other roles and "
                "needs it; restart it."
            ) from error
        except PermissionError as error:
            raise PermissionError(
                f"The summation machine at {address} refused this group: its shared secret or its "
                "number of summation machines differs. Use the same for all tasks."
            ) from error
        finally:
            client.close()


def _credential(num_spare: int) -> bytes:
    """Return the credential of messages about the group, which announce its number of workers."""
    about = model_fingerprint([], [[num_spare]], ["int32"], "summation group 1")
    return credential(read_secret(), about)


def start_machine(config: ClusterConfig | None) -> SummationService:
    """Start the service of a task of the job `summation`, for the workers of its cluster."""
    if config is None or not config.is_summation_machine:
        raise ValueError(
            "This process is not a summation machine. Received: "
            f"{'no TF_CONFIG' if config is None else config.task_name}. Set TF_CONFIG as on the "
            'workers, list this machine in "cluster" as job "summation", and give it "task": '
            '{"type": "summation", "index": 0}.'
        )
    num_workers, num_spare = len(config.sync_group_addresses), len(config.summation_machines)
    proof = summation_credential(num_workers, num_spare)
    service = SummationService(config.address_of(0), num_workers, proof)
    size = num_workers

    def take_size(sender: int, request: Message) -> Message:
        nonlocal size
        if request.kind is not Kind.GROUP_SIZE or request.numbers[0] < 2:
            raise ValueError(f"No number of workers. Received: {request.kind.name}.")
        if request.numbers[0] != size:
            (size,) = request.numbers
            service.sum_for(size, summation_credential(size, num_spare))
            _logger.info("%s sums for %d workers.", config.task_name, size)
        return Message(Kind.DONE)

    service.server.serve(_GROUP, _credential(num_spare), take_size)
    service.start()
    _logger.info("%s sums for %d workers.", config.task_name, num_workers)
    return service


def serve_until_stopped() -> None:
    """Sum until SIGTERM or Ctrl-C."""
    service = start_machine(read_cluster_config())
    print(f"summation machine is ready at {service.address}", flush=True)  # noqa: T201
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    stop.wait()
    service.close()
