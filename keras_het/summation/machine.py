"""A spare machine: sums gradients of the workers and does nothing else."""

from __future__ import annotations

import logging
import signal
import sys
import threading

from keras_het.rpc.function_server import ServerStartError
from keras_het.strategy.cluster.cluster_config import ClusterConfig, read_cluster_config
from keras_het.summation.group_size import GroupSize
from keras_het.summation.service import SummationService, summation_credential

_logger = logging.getLogger(__name__)
_POLL_SECONDS = 0.1


def start_machine(
    config: ClusterConfig | None, group_size: GroupSize | None = None
) -> SummationService:
    """Start the service of a task of the job `summation`.

    Args:
        config: the cluster; None if TF_CONFIG describes none.
        group_size: provides the number of workers, if it may change; by default the one in
            TF_CONFIG.

    Returns:
        The service; it answers until `close` or process exit.

    Raises:
        ValueError: if this process is not such a task, or there is no shared secret.
    """
    if config is None or not config.is_summation_machine:
        raise ValueError(
            "This process is no summation machine. Received: "
            f"{'no TF_CONFIG' if config is None else config.task_name}. Set TF_CONFIG as on the "
            'workers, list this machine in "cluster" as job "summation", and give it "task": '
            '{"type": "summation", "index": 0}.'
        )
    num_workers = len(config.sync_group_addresses) if group_size is None else group_size.wanted
    proof = summation_credential(num_workers, len(config.summation_machines))
    service = SummationService(config.address_of(0), num_workers, proof, group_size=group_size)
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
