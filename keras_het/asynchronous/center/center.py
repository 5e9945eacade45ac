"""The center as the task that leads the service reaches it."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import tensorflow as tf

from keras_het.asynchronous.center.exchange_engine import ExchangeEngine
from keras_het.asynchronous.center.leader_ledger import LeaderLedger
from keras_het.asynchronous.center.local_parts import LocalParts
from keras_het.asynchronous.center.remote_parts import RemoteParts
from keras_het.asynchronous.center.vector_exchange import (
    LARGEST_TRIES,
    NoCenterError,
    VectorExchange,
)
from keras_het.asynchronous.exchange.participant import Participant
from keras_het.asynchronous.parameter_service.ledger_connection import ServiceLostError
from keras_het.asynchronous.parameter_service.sample_ledger import (
    LEADER,
    Presence,
    SampleLedger,
    Stage,
)
from keras_het.asynchronous.rules import Signal

_logger = logging.getLogger("keras_het")
_LONGEST_FAREWELL_SECONDS = 1.0  # a lost service may not answer
ResultT = TypeVar("ResultT")
_DIGIT = 1 << 20


@dataclasses.dataclass(frozen=True)
class Grant:
    """Global batches of an epoch handed out to a participant."""

    first: int
    count: int
    is_last: bool

    def to_numbers(self) -> tuple[int, ...]:
        """Encode the grant as float32 numbers for a collective; each below 2**24."""
        return *divmod(self.first, _DIGIT), self.count, int(self.is_last)

    @classmethod
    def of_numbers(cls, numbers: Sequence[float]) -> Grant:
        """Restore the grant from the result of `to_numbers`."""
        digit, rest, count, is_last = (int(number) for number in numbers)
        return cls(digit * _DIGIT + rest, count, bool(is_last))


class Center:
    """The center and the sample ledger for the task that leads the service, here or elsewhere.

    Messages to a service elsewhere travel while the group computes. A lost service is an error or,
    if the options say so, the group trains on alone, takes all batches, and resumes with the
    service at the first exchange after it answers again; until then a thread polls it, and no step
    waits. A restarted service gets the group's weights.
    """

    def __init__(self, leader: Participant, parts: LocalParts | RemoteParts) -> None:
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
        self.ledger: SampleLedger | LeaderLedger = parts.ledger
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
        """Exchange the group's weights and moving statistics with the center."""
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
        """Count samples that the group has used."""
        self.ledger.add_used(LEADER, samples)
        self._try(self.ledger.tell_used, None)

    def pace(self, pace: Sequence[float]) -> tuple[np.ndarray, np.ndarray] | None:
        """Report the group's pace and return paces and silence of all; None without a service."""
        return self._try(lambda: self.ledger.pace(LEADER, pace), None)

    def weights(self) -> list[tf.Tensor]:
        """The center, one vector for each partition; the group's weights without a service."""
        own = self._leader.vectors.weights.read()
        return self._try(lambda: self.engine.weights.pull(exact=True), own)

    def state(self) -> list[tf.Tensor]:
        """The center of the moving statistics, in the same form."""
        state, own = self.engine.state, self._leader.vectors.state
        return [] if state is None or own is None else self._try(state.pull, own.read())

    def versions(self) -> np.ndarray:
        """Last known number of updates of each partition of the weights."""
        if not self._is_closed:
            self._try(self.engine.weights.pull, None)
        return self.engine.weights.latest_versions

    def training_workers(self) -> list[int]:
        """Async workers that are training."""
        return self._present(Presence.TRAINING)

    def waiting_workers(self) -> list[int]:
        """Async workers that have finished and wait for the final weights."""
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
        """End the service; tell the tasks that hold it."""
        self.engine.watch.stop()
        if not self.engine.is_given_up:
            self._parts.close(_LONGEST_FAREWELL_SECONDS if self.engine.is_away else None)

    def _open(self) -> None:
        self.ledger.tell(self._taken_until)
        self._parts.open_directory()

    def _exchange(
        self, weights: list[tf.Tensor], state: list[tf.Tensor], samples: int, push: bool, wait: bool
    ) -> list[tf.Tensor]:
        """Continue from the last answer, and send again."""
        engine = self.engine
        state = engine.exchange_state(state, samples)
        weights = engine.receive(weights)
        if push:
            weights = engine.send(weights, samples)
        if wait:
            weights = engine.receive(weights)
            for _ in range(LARGEST_TRIES):  # changes that were too stale for the center
                if not engine.weights.has_own_progress:
                    break
                weights = engine.receive(engine.send(weights, samples))
        return [*weights, *state]

    def _claim(self, epoch: int, count: int) -> Grant:
        first, granted = self.ledger.claim(LEADER, epoch, count)
        return Grant(first, granted, granted < count)

    def _meet_again(self) -> None:
        """Resume with the service after a loss."""
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
