"""The center as the task that leads the service reaches it."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Mapping, Sequence

import numpy as np

from keras_het.asynchronous.exchange.claims import Grant
from keras_het.asynchronous.exchange.connection import connect, connect_vectors
from keras_het.asynchronous.exchange.exchange_engine import (
    LARGEST_TRIES,
    ExchangeEngine,
    NoCenterError,
)
from keras_het.asynchronous.exchange.participant import Participant
from keras_het.asynchronous.parameter_service.client import (
    Channel,
    RemoteChannel,
    ServiceLostError,
    UnknownTrainingError,
)
from keras_het.asynchronous.parameter_service.hosting import HostedParts, ServiceSpec, make_offer
from keras_het.asynchronous.parameter_service.sample_ledger import (
    LEADER,
    LeaderLedger,
    Presence,
    Stage,
)
from keras_het.exchange.message import Kind, Message, Vector
from keras_het.exchange.server import Server
from keras_het.ignored_errors import ignore_errors
from keras_het.rules import serialize
from keras_het.strategy.cluster.arrival import free_port
from keras_het.strategy.cluster.cluster_config import config_of

_logger = logging.getLogger(__name__)
_LONGEST_FAREWELL_SECONDS = 1.0  # a lost service may not answer


class Center:
    """The center and the sample ledger for the task that leads the service, here or elsewhere."""

    # `tasks` are the addresses that run `keras-het parameter-server`, `own` the parts of this
    # process if it holds all.

    _awaits_center = False

    def __init__(
        self,
        service: contextlib.ExitStack,
        leader: Participant,
        addresses: Sequence[str],
        tasks: Sequence[str] = (),
        own: HostedParts | None = None,
    ) -> None:
        self._leader, self._options = leader, leader.options
        self._addresses, self._tasks = list(addresses), list(tasks)
        seconds = leader.options.startup_timeout_seconds
        self._offer(self._tasks, seconds)
        # On a shared connection, short messages would queue behind the weights.
        self._first, *self._channels = [
            RemoteChannel(at, leader.credential, LEADER, leader.options.timeout_seconds)
            if own is None
            else Channel(at, functools.partial(own.handle, LEADER, is_own=True))
            for at in (self._addresses[0], *self._addresses)
        ]
        wire = leader.options.wire if own is None else None  # within it nothing is rounded
        for channel in (self._first, *self._channels):
            service.callback(channel.close)
        self._exchange = connect(lambda: connect_vectors(leader, self._channels, wire), seconds)
        self.ledger = LeaderLedger(self._first)
        self._waits = leader.rule.uses_gradients or own is not None
        training_state = leader.strategy.extended.training_state
        self._bring_center(training_state.restored)
        training_state.restored = None
        self.engine = ExchangeEngine(
            self._exchange,
            self._find_restarted,
            leader.options,
            "The sync group",
            self._note_loss,
        )
        self._exchange.attach()
        training_state.export = self.exported
        self._taken_until = 0
        service.callback(self.close)
        _logger.info("The parameter service is at %s.", ", ".join(self._addresses))

    def exported(self) -> dict[str, np.ndarray] | None:
        """Return versions and rule state for a backup, as arrays; None without a service."""
        return self.engine.attempt(self._exchange.transport.export, None)

    def start_epoch(self, epoch: int) -> None:
        """Begin an epoch; the first one also admits async workers."""
        self._taken_until = 0
        self.ledger.facts = self._leader.facts._replace(stage=Stage.RUNNING, epoch=epoch)
        self.engine.attempt(self._open, None)

    def set_stage(self, stage: Stage) -> None:
        """Announce the stage to all async workers; in the last stage they change nothing."""
        if stage == Stage.CLOSED:
            self.engine.attempt(self._exchange.transport.close_training, None)
        self.ledger.facts = self.ledger.facts._replace(stage=stage)
        self.engine.attempt(self.ledger.tell, None)

    def exchange(
        self, values: list[Vector], samples: int, push: bool, wait: bool = False
    ) -> list[Vector]:
        """Exchange weights and moving statistics; return those from which to continue."""
        engine, exchange = self.engine, self._exchange
        if engine.is_away:
            return values
        with engine.losing():
            count = exchange.num_weights
            if engine.is_lost:
                self._meet_again()
                own = engine.attached_again(values[:count], self._leader.num_participants)
                values = [*own, *values[count:]]
            values = exchange.receive(values)
            if push:
                pending = exchange.send(values, samples)
                values = pending.sent
                pending.check()
            if wait or self._waits:
                values = exchange.receive(values)
                for _ in range(LARGEST_TRIES):  # changes that were too stale for the center
                    if not exchange.has_own_progress:
                        break
                    values = [*exchange.send(values[:count], samples).sent, *values[count:]]
                    values = exchange.receive(values)
        return values

    def claim(self, epoch: int, count: int) -> Grant:
        """Claim batches of an epoch; without a service, the group gets all that follow."""
        left = self._leader.num_batches - self._taken_until
        alone = Grant(self._taken_until, min(count, left), count > left)
        grant = self.engine.attempt(lambda: self._claim(epoch, count), alone)
        if grant.count:
            self._taken_until = grant.first + grant.count
        return grant

    def add_used(self, samples: int) -> None:
        self.ledger.add_used(samples)
        self.engine.attempt(self.ledger.tell_used, None)

    def pace(self, pace: Sequence[float]) -> tuple[np.ndarray, np.ndarray] | None:
        return self.engine.attempt(lambda: self.ledger.pace(pace), None)

    def read(self) -> list[Vector]:
        """Return the center, or the leader's own weights and statistics without a service."""
        own = self._leader.vectors.read()
        return self.engine.attempt(lambda: self._exchange.pull(exact=True), own)

    def versions(self) -> np.ndarray:
        """Last known number of updates of each partition of the weights."""
        if not self.ledger.is_kept:
            self.engine.attempt(self._exchange.pull, None)
        return self._exchange.latest_versions[: self._exchange.num_weights]

    def present(self, presence: Presence) -> list[int]:
        """Return the async workers that do this, according to a recent report."""
        seconds = self._options.presence_seconds
        return self.engine.attempt(lambda: self.ledger.present(presence, seconds), [])

    def skip(self, worker: int) -> bool:
        """Stop all waiting for a worker that is gone."""
        client = self._exchange.transport
        return self.engine.attempt(lambda: client.leave(worker), False)

    def conclude(self) -> None:
        """Keep versions and counts readable after the end of the service."""
        self.engine.attempt(self._exchange.pull, None)
        self.engine.attempt(self.ledger.tell, None)
        self.ledger.is_kept = True

    def close(self) -> None:
        """Tell the tasks that serve of the end."""
        self.engine.watch.stop()
        if not self.engine.is_given_up:
            seconds = self._options.timeout_seconds
            seconds = _LONGEST_FAREWELL_SECONDS if self.engine.is_away else seconds
            places = dict(zip(self._addresses, self._channels, strict=True))
            channels = [places[task] for task in self._tasks]
            for channel in channels:
                channel.timeout_seconds = seconds  # also of connecting
            for call in [channel.start(Message(Kind.FINISH)) for channel in channels]:
                with ignore_errors("taking leave"):  # the answer may be lost with it
                    call.result(seconds)

    def _open(self) -> None:
        """Admit async workers: tell them where the parts are."""
        self.ledger.tell(self._taken_until)
        text = np.frombuffer(",".join(self._addresses).encode(), np.uint8)
        self._channels[0].ask(Message(Kind.DIRECTORY, (), (text,)))

    def _claim(self, epoch: int, count: int) -> Grant:
        _, first, granted = self.ledger.claim(epoch, count)
        return Grant(first, granted, granted < count)

    def _meet_again(self) -> None:
        restarted = self._find_restarted()
        if restarted or self._awaits_center:
            self._awaits_center = True  # until all have it: another try must redo everything
            self._offer(restarted, self._options.timeout_seconds)
            connect(self._exchange.transport.greet, self._options.timeout_seconds)
            self._bring_center()
            self._exchange.attach()
            self._awaits_center = False
        else:
            self._exchange.meet_again()
        self._open()

    def _find_restarted(self) -> list[str]:
        """Return the addresses of restarted processes that do not know this training."""
        found = []
        for address, channel in zip(self._addresses, self._channels, strict=True):
            try:
                channel.ask(Message(Kind.LATEST))
            except UnknownTrainingError:
                found.append(address)
        return found

    def _bring_center(self, saved: Mapping[str, np.ndarray] | None = None) -> None:
        """Make the leader's current weights and moving statistics the center."""
        values = self._leader.vectors.read()
        self._exchange.transport.restore(values, saved, self._exchange.seen_pushes)

    def _offer(self, tasks: Sequence[str], patience: float) -> None:
        leader = self._leader
        spec = spec_of(leader, len(self._addresses))
        for address in tasks:
            place = self._addresses.index(address)
            offer = address, leader.secret, spec, place, leader.options.timeout_seconds
            connect(functools.partial(make_offer, *offer), patience)

    def _note_loss(self, error: ServiceLostError) -> None:
        if isinstance(error, NoCenterError):  # it may know this training, from an earlier offer
            self._awaits_center = True


def spec_of(participant: Participant, num_services: int) -> ServiceSpec:
    vectors, options = participant.vectors, participant.options
    state = vectors.state.partitions.shapes if vectors.state is not None else ()
    return ServiceSpec(
        shapes=vectors.weights.partitions.shapes,
        state_shapes=state,
        rule=serialize(participant.rule),
        state_rule=serialize(participant.state_rule),
        wire=options.wire.name,
        num_participants=participant.num_participants,
        max_staleness=options.max_staleness,
        fingerprint=participant.service_fingerprint,
        num_services=num_services,
        partition_bytes=options.partition_bytes,
    )


def join_service(participant: Participant, service: contextlib.ExitStack) -> Center | None:
    """Start this task's parts of the service until `service` closes; the leader connects."""
    strategy, options = participant.strategy, participant.options
    config = config_of(strategy)
    tasks = list(config.service_addresses())
    if options.spreads_service:
        return _spread(participant, service, tasks)
    if not config.has_sync_group and len(tasks) > 1:
        _make_parts(participant, service, tasks[0], 0, len(tasks)).start()
        return Center(service, participant, tasks, tasks[1:])
    if not strategy.is_chief:
        return None
    if config.has_sync_group and tasks:
        return Center(service, participant, tasks, tasks)
    address = config.service_address()
    parts = _make_parts(participant, service, address, 0, 1)
    # Served once it has the center: async workers wait for a server more quietly than for a center.
    center = Center(service, participant, [address], own=parts)
    parts.start()
    return center


def _spread(
    participant: Participant, service: contextlib.ExitStack, tasks: list[str]
) -> Center | None:
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
    _make_parts(participant, service, everyone[place], place, len(everyone)).start()
    return Center(service, participant, everyone, tasks) if strategy.is_chief else None


def _make_parts(
    participant: Participant, service: contextlib.ExitStack, address: str, place: int, count: int
) -> HostedParts:
    rules = participant.rule, participant.state_rule
    server = Server(address)
    service.callback(server.close)
    server.start()
    return HostedParts(server, place, spec_of(participant, count), participant.secret, rules)
