"""A spare machine: sums gradients, for a number of workers that changes with their roles."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Sequence

from keras_het.exchange.client import Client
from keras_het.exchange.message import Kind, Message
from keras_het.exchange.secret import credential, model_fingerprint, read_secret
from keras_het.strategy.cluster.cluster_config import ClusterConfig, read_cluster_config
from keras_het.summation.service import SummationService, summation_credential

_logger = logging.getLogger(__name__)
_SERVICE = "group"
_PATIENCE_SECONDS = 120.0


def tell_group_size(addresses: Sequence[str], num_workers: int) -> None:
    """Make spare machines sum for another number of workers, and wait until they do."""
    for address in addresses:
        client = Client(address, _SERVICE, _credential(len(addresses)))
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
            "This process is no summation machine. Received: "
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

    service.server.serve(_SERVICE, _credential(num_spare), take_size)
    service.start()
    _logger.info("%s sums for %d workers.", config.task_name, num_workers)
    return service


def main() -> None:
    """Sum until terminated (SIGTERM, SIGINT); a restarted group may have fewer workers.

    A failed start prints one error line and exits with code 2.
    """
    try:
        _sum_until_told_to_end()
    except (ValueError, OSError) as error:
        sys.stderr.write(f"[keras-het] error: {error}\n")
        sys.exit(2)


def _sum_until_told_to_end() -> None:
    service = start_machine(read_cluster_config())
    print(f"summation machine is ready at {service.address}", flush=True)  # noqa: T201
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    stop.wait()
    service.close()
