"""Location of the parameter service, and its start by a participant."""

from __future__ import annotations

import dataclasses

import numpy as np

from keras_het.asynchronous.center.center import Center
from keras_het.asynchronous.center.hosted_parts import HostedParts
from keras_het.asynchronous.center.local_parts import LocalParts
from keras_het.asynchronous.center.remote_parts import RemoteParts
from keras_het.asynchronous.center.service_spec import spec_of
from keras_het.asynchronous.exchange.participant import Participant
from keras_het.strategy.cluster.cluster_address import free_port
from keras_het.strategy.cluster.cluster_config import config_of


@dataclasses.dataclass
class OpenService:
    """One participant's view of the service."""

    center: Center | None = None
    parts: HostedParts | None = None

    def close(self) -> None:
        """Close everything that this participant holds."""
        if self.center is not None:
            self.center.close()
        if self.parts is not None:
            self.parts.close()


def join_service(participant: Participant) -> OpenService:
    """Start the parts of the service that belong to this task; the leader then connects."""
    strategy, options = participant.strategy, participant.options
    config = config_of(strategy)
    tasks = list(config.service_addresses())
    if options.spreads_service:
        return _spread(participant, tasks)
    if not config.has_sync_group and len(tasks) > 1:
        parts = _start_parts(participant, tasks[0], 0, len(tasks))
        return OpenService(Center(participant, RemoteParts(participant, tasks, tasks[1:])), parts)
    if not strategy.is_chief:
        return OpenService()
    if config.has_sync_group and tasks:
        return OpenService(Center(participant, RemoteParts(participant, tasks, tasks)))
    return OpenService(Center(participant, LocalParts(participant, config.service_address())))


def _spread(participant: Participant, tasks: list[str]) -> OpenService:
    """Give a part to every member of the sync group and every task of the job `ps`."""
    strategy = participant.strategy
    config, extended = config_of(strategy), strategy.extended
    hosts = [address.rpartition(":")[0] for address in config.sync_group_addresses]
    own = hosts[strategy.worker_index]
    port = free_port(own)
    if strategy.is_chief and not tasks:
        port = int(config.service_address().rpartition(":")[2])
    ports = extended.gather_over_workers(np.array([port], np.int64))
    members = [f"{host}:{int(port)}" for host, port in zip(hosts, ports, strict=True)]
    if not tasks:
        members[0] = config.service_address()
    everyone = [*tasks, *members]
    place = len(tasks) + strategy.worker_index
    parts = _start_parts(participant, everyone[place], place, len(everyone))
    if not strategy.is_chief:
        return OpenService(None, parts)
    return OpenService(Center(participant, RemoteParts(participant, everyone, tasks)), parts)


def _start_parts(participant: Participant, address: str, place: int, count: int) -> HostedParts:
    rules = participant.rule, participant.state_rule
    parts = HostedParts(address, place, spec_of(participant, count), participant.secret, rules)
    parts.start()
    return parts
