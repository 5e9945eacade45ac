"""Start the summation of one worker and connect it to the others."""

from __future__ import annotations

import atexit
import os
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from keras_het.strategy.cluster.cluster_address import free_port
from keras_het.strategy.cluster.cluster_config import CHOSEN_ROLES, ClusterConfig
from keras_het.summation.group import SummationGroup
from keras_het.summation.group_size import tell_group_size
from keras_het.summation.options import Summation
from keras_het.summation.service import SummationService, summation_credential

if TYPE_CHECKING:
    from keras_het.strategy.extended import HeterogeneousExtended
    from keras_het.strategy.membership import Membership


def start_summation(
    options: Summation,
    extended: HeterogeneousExtended,
    membership: Membership,
    check: Callable[[], None],
) -> SummationGroup:
    """Start this worker's service and join those of all machines; all workers must call it.

    Args:
        options: the user's options.
        extended: the strategy's `HeterogeneousExtended`.
        membership: the workers, and in TF_CONFIG the spare machines. A worker's service listens on
            a free port of its host in TF_CONFIG.
        check: called while waiting for the others; raises if one is lost.

    Raises:
        ValueError: if there is no shared secret, or the rates do not fit the cluster.
        ConnectionError: if a machine does not answer.
        PermissionError: if a machine refuses this worker.
    """
    hosts = [address.rpartition(":")[0] for address in membership.workers.values()]
    spare = () if membership.config is None else membership.config.summation_machines
    worker, num_workers = extended.layout.worker_index, extended.layout.num_workers
    proof = summation_credential(num_workers, len(spare))
    port = free_port(hosts[worker])
    service = SummationService(f"{hosts[worker]}:{port}", num_workers, proof)
    service.start()
    if worker == 0 and spare and os.environ.get(CHOSEN_ROLES):
        tell_group_size(spare, num_workers, proof)  # before the others join
    told = np.array([port, secrets.randbelow(2**62) + 1], np.int64)
    everyone = extended.gather_over_workers(told).reshape(-1, len(told))
    addresses = [f"{host}:{port}" for host, port in zip(hosts, everyone[:, 0], strict=True)]
    machines, run = [*addresses, *spare], int(everyone[0, 1])
    group = SummationGroup(options, service, machines, num_workers, worker, proof, run, check)
    atexit.register(group.close)
    return group


def check_is_no_summation_machine(config: ClusterConfig | None) -> None:
    """Refuse to train on a machine reserved for summing gradients.

    Args:
        config: the cluster; None if TF_CONFIG describes none.

    Raises:
        RuntimeError: on a task of the job `summation`.
    """
    if config is not None and config.is_summation_machine:
        raise RuntimeError(
            'TF_CONFIG gives this process the job "summation": it sums gradients of the workers '
            "and does not train. Run `python -m keras_het.summation` here instead of the "
            "training script."
        )
