"""The center as the task that leads the service reaches it."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import tensorflow as tf

from keras_het.asynchronous.exchange.claims import Grant
from keras_het.asynchronous.exchange.connection import LeaderConnection
from keras_het.asynchronous.exchange.exchange_engine import (
    LARGEST_TRIES,
    ExchangeEngine,
    NoCenterError,
    VectorExchange,
)
from keras_het.asynchronous.exchange.hosting import HostedParts, spec_of
from keras_het.asynchronous.exchange.participant import Participant
from keras_het.asynchronous.parameter_service.sample_ledger import (
    Presence,
    ServiceLostError,
    Stage,
)
from keras_het.asynchronous.rules import Signal
from keras_het.strategy.cluster.cluster_address import free_port
from keras_het.strategy.cluster.cluster_config import config_of

_logger = logging.getLogger("keras_het")
_LONGEST_FAREWELL_SECONDS = 1.0  # a lost service may not answer
ResultT = TypeVar("ResultT")


class Center:
    """The center and the sample ledger for the task that leads the service, here or elsewhere.

    Messages to a service elsewhere travel while the group computes. A lost service is an error or,
    if the options say so, the group trains on alone, takes all batches, and resumes with the
    service at the first exchange after it answers again; until then a thread polls it, and no step
    waits. A restarted service gets the group's weights.
    """

    def __init__(self, leader: Participant, parts: LeaderConnection) -> None:
        self._leader, self._options, self._parts = leader, leader.options, parts
        self._waits = leader.rule.uses_gradients or parts.answers_at_once
        training_state = leader.strategy._training_state
        parts.bring_center(training_state.restored)
        training_state.restored = None
        weights = VectorExchange(parts.weights, leader.rule)
        state = None if parts.state is None else VectorExchange(parts.state, leader.state_rule)
        self.engine = ExchangeEngine(
            weights,
            state,
            lambda: self._parts.restarted(),
            leader.options,
            "The sync group",
            self._note_loss,
        )
        self.engine.attach()
        training_state.export = self.exported
        self.ledger = parts.ledger
        self._taken_until = 0
        self._is_closed = False
        _logger.info("The parameter service is at %s.", ", ".join(parts.addresses))

    def exported(self) -> dict[str, np.ndarray] | None:
        """Return versions and rule state for a backup, as arrays; None without a service."""
        return self._try(self._parts.exported, None)

    def start_epoch(self, epoch: int) -> None:
        """Begin an epoch; the first one also admits async workers."""
        self._taken_until = 0
        self.ledger.start_epoch(epoch, self._leader.facts)
        self.ledger.set_stage(Stage.RUNNING)
        self._try(self._open, None)

    def set_stage(self, stage: Stage) -> None:
        """Announce the stage to all async workers; in the last stage they change nothing."""
        if stage == Stage.CLOSED:
            self._try(self._parts.close_training, None)
        self.ledger.set_stage(stage)
        self._try(self.ledger.tell, None)

    def exchange(
        self,
        weights: list[tf.Tensor],
        state: list[tf.Tensor],
        samples: int,
        push: bool,
        wait: bool = False,
    ) -> list[tf.Tensor]:
        if self.engine.is_away:
            return [*weights, *state]
        try:
            if self.engine.is_lost:
                self._meet_again()
                weights = self.engine.attached_again(weights, self._leader.num_participants)
            return self._exchange(weights, state, samples, push, wait or self._waits)
        except ServiceLostError as error:
            self.engine.lose(error)
            return [*weights, *state]

    def claim(self, epoch: int, count: int) -> Grant:
        """Claim batches of an epoch; without a service, the group gets all that follow."""
        left = self._leader.num_batches - self._taken_until
        alone = Grant(self._taken_until, min(count, left), count > left)
        grant = self._try(lambda: self._claim(epoch, count), alone)
        if grant.count:
            self._taken_until = grant.first + grant.count
        return grant

    def add_used(self, samples: int) -> None:
        self.ledger.add_used(samples)
        self._try(self.ledger.tell_used, None)

    def pace(self, pace: Sequence[float]) -> tuple[np.ndarray, np.ndarray] | None:
        return self._try(lambda: self.ledger.pace(pace), None)

    def weights(self) -> list[tf.Tensor]:
        own = self._leader.vectors.weights.read()
        return self._try(lambda: self.engine.weights.pull(exact=True), own)

    def state(self) -> list[tf.Tensor]:
        state, own = self.engine.state, self._leader.vectors.state
        return [] if state is None or own is None else self._try(state.pull, own.read())

    def versions(self) -> np.ndarray:
        """Last known number of updates of each partition of the weights."""
        if not self._is_closed:
            self._try(self.engine.weights.pull, None)
        return self.engine.weights.latest_versions

    def training_workers(self) -> list[int]:
        return self._present(Presence.TRAINING)

    def waiting_workers(self) -> list[int]:
        return self._present(Presence.WAITING)

    def skip(self, worker: int) -> bool:
        """Stop all waiting for a worker that is gone."""
        stage = self._try(lambda: self._parts.weights.signal(Signal.LEAVE, worker), None)
        return stage is not None

    def conclude(self) -> None:
        """Keep versions and counts readable after the end of the service."""
        self._try(self.engine.weights.pull, None)
        self._try(self.ledger.tell, None)
        self.ledger.keep()
        self._is_closed = True

    def close(self) -> None:
        self.engine.watch.stop()
        if not self.engine.is_given_up:
            self._parts.close(_LONGEST_FAREWELL_SECONDS if self.engine.is_away else None)

    def _open(self) -> None:
        self.ledger.tell(self._taken_until)
        self._parts.open_directory()

    def _exchange(
        self, weights: list[tf.Tensor], state: list[tf.Tensor], samples: int, push: bool, wait: bool
    ) -> list[tf.Tensor]:
        engine = self.engine
        state = engine.exchange_state(state, samples)
        weights = engine.weights.receive(weights)
        if push:
            weights = engine.weights.send(weights, samples).sent
        if wait:
            weights = engine.weights.receive(weights)
            for _ in range(LARGEST_TRIES):  # changes that were too stale for the center
                if not engine.weights.has_own_progress:
                    break
                weights = engine.weights.receive(engine.weights.send(weights, samples).sent)
        return [*weights, *state]

    def _claim(self, epoch: int, count: int) -> Grant:
        _, first, granted = self.ledger.claim(epoch, count)
        return Grant(first, granted, granted < count)

    def _meet_again(self) -> None:
        restarted = self._parts.restarted()
        if restarted or self._parts.awaits_center:
            self._parts.begin_again(restarted)
            self.engine.attach()
            self._parts.awaits_center = False
        else:
            self.engine.meet_again()
        self._open()

    def _present(self, presence: Presence) -> list[int]:
        seconds = self._options.presence_seconds
        return self._try(lambda: self.ledger.present(presence, seconds), [])

    def _try(self, ask: Callable[[], ResultT], otherwise: ResultT) -> ResultT:
        return self.engine.attempt(ask, otherwise)

    def _note_loss(self, error: ServiceLostError) -> None:
        if isinstance(error, NoCenterError):  # it may know this training, from an earlier offer
            self._parts.awaits_center = True


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
        return OpenService(
            Center(participant, LeaderConnection(participant, tasks, tasks[1:])), parts
        )
    if not strategy.is_chief:
        return OpenService()
    if config.has_sync_group and tasks:
        return OpenService(Center(participant, LeaderConnection(participant, tasks, tasks)))
    address = config.service_address()
    parts = _make_parts(participant, address, 0, 1)
    # Served once it has the center: async workers wait for a server more quietly than for a center.
    center = Center(participant, LeaderConnection(participant, [address], own=parts))
    parts.start()
    return OpenService(center, parts)


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
    return OpenService(Center(participant, LeaderConnection(participant, everyone, tasks)), parts)


def _start_parts(participant: Participant, address: str, place: int, count: int) -> HostedParts:
    parts = _make_parts(participant, address, place, count)
    parts.start()
    return parts


def _make_parts(participant: Participant, address: str, place: int, count: int) -> HostedParts:
    rules = participant.rule, participant.state_rule
    return HostedParts(address, place, spec_of(participant, count), participant.secret, rules)
