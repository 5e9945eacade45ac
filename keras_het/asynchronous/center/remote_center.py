"""The leader's interface to a parameter service in other processes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_het.asynchronous.center.center import Center, Grant
from keras_het.asynchronous.center.leader_ledger import LeaderLedger
from keras_het.asynchronous.center.remote_parts import LEADER, RemoteParts
from keras_het.asynchronous.center.return_watch import ReturnWatch
from keras_het.asynchronous.center.service_connection import (
    LARGEST_TRIES,
    CenterClient,
    NoCenterError,
    Pending,
)
from keras_het.asynchronous.parameter_service.ledger_client import LedgerClient, ServiceLostError
from keras_het.asynchronous.parameter_service.sample_ledger import Presence, Stage
from keras_het.asynchronous.rules import Signal

_logger = logging.getLogger("keras_het")
_LONGEST_FAREWELL_SECONDS = 1.0  # a lost service may not answer


class RemoteCenter(Center):
    """A center that exchanges like an async worker: messages travel while the group computes.

    A lost service is an error or, if the options say so, the group trains on alone, takes all
    batches, and resumes with the service at the first exchange after it answers again; until then a
    thread polls it, and no step waits. A restarted service gets the group's weights.

    Args:
        group: the sync group, whose current weights become the center.
        addresses: addresses of all processes of the service, the one with the ledger first.
        tasks: those of them that only this center can end.

    Raises:
        ConnectionError: if a process does not answer.
        PermissionError: if a process refuses this group.
    """

    def __init__(self, group: Any, addresses: Sequence[str], tasks: Sequence[str]) -> None:
        self._group, self._options = group, group.options
        self._waits = group.rule.uses_gradients
        strategy = group.strategy
        self._parts = RemoteParts(group, addresses, tasks)
        saved, strategy._training_state.restored = strategy._training_state.restored, None
        self._parts.bring_center(saved)
        self._weights = CenterClient(self._parts.weights, group.rule)
        self._state: CenterClient | None = None
        if self._parts.state is not None:
            self._state = CenterClient(self._parts.state, group.state_rule)
        self._adopt_center()
        strategy._training_state.export = self.exported
        seconds = self._options.timeout_seconds
        self.ledger = LeaderLedger(LedgerClient(addresses[0], group.credential, LEADER, seconds))
        self._pending: Pending | None = None
        self._taken_until = 0
        self._is_closed = self._is_lost = self._is_given_up = False
        self._return = ReturnWatch(self._parts.restarted, seconds)
        _logger.info("The parameter service is at %s.", ", ".join(addresses))

    def exported(self) -> dict[str, np.ndarray] | None:
        """Return versions and rule state for a backup, as arrays; None without a service."""
        found: dict[str, np.ndarray] | None = self._try(self._parts.exported, None)
        return found

    def start_epoch(self, epoch: int) -> None:
        """Begin an epoch."""
        self._taken_until = 0
        self.ledger.note(Stage.RUNNING, epoch, self._group.facts)
        self._try(self._open, None)

    def set_stage(self, stage: Stage) -> None:
        """Announce the stage to all async workers; in the last stage they change nothing."""
        if stage == Stage.CLOSED:
            self._try(self._parts.close_training, None)
        self.ledger.note(stage)
        self._try(self.ledger.tell, None)

    def exchange(
        self, weights: list[Any], state: list[Any], samples: int, push: bool, wait: bool = False
    ) -> list[Any]:
        """Continue from the last answer, and send again."""
        if self._is_lost and not self._return.has_answered:
            return [*weights, *state]
        try:
            if self._is_lost:
                self._attach_again()
                clients = self._group.num_clients
                weights = self._weights.after_absence(weights, self._pending, clients)
            return self._exchange(weights, state, samples, push, wait or self._waits)
        except ServiceLostError as error:
            self._lose(error)
            return [*weights, *state]

    def claim(self, epoch: int, count: int) -> Grant:
        """Claim batches of an epoch; without a service, the group gets all that follow."""
        left = self._group.num_batches - self._taken_until
        alone = Grant(self._taken_until, min(count, left), count > left)
        grant: Grant = self._try(lambda: self._claim(epoch, count), alone)
        if grant.count:
            self._taken_until = grant.first + grant.count
        return grant

    def add_used(self, samples: int) -> None:
        """Count samples that the group has used."""
        self.ledger.note_used(samples)
        self._try(self.ledger.tell_used, None)

    def pace(self, pace: Sequence[float]) -> tuple[Any, Any] | None:
        """Report the group's pace and ask for the pace of all clients."""
        found: tuple[Any, Any] | None = self._try(lambda: self.ledger.pace(LEADER, pace), None)
        return found

    def weights(self) -> list[Any]:
        """The center; the group's weights without a service."""
        own = self._group.vectors.weights.read()
        return list(self._try(lambda: self._weights.pull(exact=True), own))

    def state(self) -> list[Any]:
        """The center of the moving statistics, in the same form."""
        if self._state is None:
            return []
        own = self._group.vectors.state.read()
        return list(self._try(self._state.pull, own))

    def versions(self) -> Any:
        """Last known number of updates of each partition of the weights."""
        if not self._is_closed:
            self._try(self._weights.pull, None)
        return self._weights.latest_versions

    def training_clients(self) -> list[int]:
        """Async workers that are training."""
        return self._present(Presence.TRAINING)

    def waiting_clients(self) -> list[int]:
        """Async workers that have finished and wait for the final weights."""
        return self._present(Presence.WAITING)

    def skip(self, client: int) -> bool:
        """Stop all waiting for a client that is gone."""
        stage = self._try(lambda: self._parts.weights.signal(Signal.LEAVE, client), None)
        return stage is not None

    def conclude(self) -> None:
        """Ask for versions and counts one last time."""
        self._try(self._weights.pull, None)
        self._try(self.ledger.tell, None)
        self.ledger.keep()
        self._is_closed = True

    def close(self) -> None:
        """Tell the tasks of the service that training is over."""
        self._return.stop()
        if not self._is_given_up:
            is_away = self._is_lost and not self._return.has_answered
            self._parts.close(_LONGEST_FAREWELL_SECONDS if is_away else None)

    def _open(self) -> None:
        self.ledger.tell(self._taken_until)
        self._parts.open_directory()

    def _exchange(
        self, weights: list[Any], state: list[Any], samples: int, push: bool, wait: bool
    ) -> list[Any]:
        if self._state is not None:
            state = self._state.finish(self._state.send(state, samples), state)
        weights = self._finished(weights)
        if push:
            self._pending = self._weights.send(weights, samples)
            weights = self._pending.sent
        if wait:
            weights = self._settled(self._finished(weights), samples)
        return [*weights, *state]

    def _settled(self, weights: list[Any], samples: int) -> list[Any]:
        """Resend changes that were too stale for the center."""
        for _ in range(LARGEST_TRIES):
            if not self._weights.has_own_progress:
                break
            self._pending = self._weights.send(weights, samples)
            weights = self._finished(weights)
        return weights

    def _finished(self, weights: list[Any]) -> list[Any]:
        """Return the weights after the answer in flight, if any."""
        if self._pending is not None:
            weights = self._weights.finish(self._pending, weights)
            self._pending = None
        return weights

    def _claim(self, epoch: int, count: int) -> Grant:
        first, granted = self.ledger.claim(LEADER, epoch, count)
        return Grant(first, granted, granted < count)

    def _attach_again(self) -> None:
        """Resume with the service after a loss.

        Raises:
            ServiceLostError: if it is still lost.
        """
        restarted = self._parts.restarted()
        if restarted or self._parts.awaits_center:
            self._parts.begin_again(restarted)
            self._adopt_center()
            self._pending = None
            self._parts.awaits_center = False
        else:  # all parts answer before `after_absence`: a failed try must not scale again
            self._weights.meet_again(self._pending)
            if self._state is not None:
                self._state.meet_again(None)
        self._open()
        self._is_lost = False
        self._return.attached()
        _logger.warning("The parameter service answers again.")

    def _adopt_center(self) -> None:
        self._weights.adopt(self._weights.pull())
        if self._state is not None:
            self._state.adopt(self._state.pull())

    def _present(self, presence: Presence) -> list[int]:
        seconds = self._options.presence_seconds
        found: list[int] = self._try(lambda: self.ledger.present(presence, seconds), [])
        return found

    def _try(self, ask: Any, otherwise: Any) -> Any:
        if self._is_lost:
            return otherwise
        try:
            return ask()
        except ServiceLostError as error:
            self._lose(error)
            return otherwise

    def _lose(self, error: ServiceLostError) -> None:
        if not self._options.goes_on_without_service:
            self._is_given_up = True
            raise error
        if isinstance(error, NoCenterError):  # it may know this training, from an earlier offer
            self._parts.awaits_center = True
        self._return.start()
        if not self._is_lost:
            self._is_lost = True
            _logger.warning("%s The sync group goes on alone.", error)
