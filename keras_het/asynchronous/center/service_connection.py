"""An async worker's connection to the parameter service: opened, lost, reopened."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_het.asynchronous.center.hosted_parts import DIRECTORY
from keras_het.asynchronous.exchange.participant import (
    STATE_PREFIX,
    WEIGHTS_PREFIX,
    first_async_client,
)
from keras_het.asynchronous.parameter_service import NO_ANSWER, ParameterClient, Status, TopKWire
from keras_het.asynchronous.parameter_service.client import PendingPush
from keras_het.asynchronous.parameter_service.ledger_client import LedgerClient, ServiceLostError
from keras_het.asynchronous.parameter_service.sample_ledger import Presence, Stage
from keras_het.asynchronous.rules import Signal
from keras_het.rpc.admission import DIVERGED
from keras_het.rpc.function_client import FunctionClient

_POLL_SECONDS = 0.05
_SILENT_SECONDS = 10.0  # of waiting for a service that has yet to start
_TURN_SECONDS = (0.002, 0.016)  # first and longest pause between two questions about the turn
_ROOM_FOR_STRAGGLERS = 1 << 20
_UNANSWERED = (NO_ANSWER, int(Status.NO_CENTER))
LARGEST_TRIES = 100
"""Pushes of the same change if others push in between, with a bound on staleness."""
_logger = logging.getLogger("keras_het")
_WAITS = "No parameter service for %.0f s; waiting up to %g s for it to start. %s(%s)"


class NoCenterError(ServiceLostError):
    """A part of the service was restarted, and its leader has yet to restore the center."""


@dataclasses.dataclass
class Pending:
    """A push in flight; it can be sent again and counts once.

    Args:
        push: the messages.
        samples: number of samples behind the change.
        versions: version of each partition that the worker had seen.
        sequence: the number of the push.
        sent: weights from which the worker continued, for each partition.
        had_to_wait: whether the worker was told to wait for its turn.
    """

    push: PendingPush
    samples: int
    versions: Any
    sequence: int
    sent: list[Any]
    had_to_wait: bool = False


class CenterClient:
    """Client that exchanges one worker's vectors with the service.

    Args:
        client: the connection of these vectors.
        rule: the update rule.

    Attributes:
        seen: the answer of the last exchange, for each partition.
        lost_gradient: whether the latest push was a gradient of which no part was taken.
    """

    def __init__(self, client: ParameterClient, rule: Any) -> None:
        self._client, self._rule = client, rule
        self.seen: list[Any] = []
        self._versions = np.zeros(len(client.partitions.sizes), np.int64)
        self._latest_versions = self._versions
        self._residuals: list[Any] | None = None
        # An earlier process with this number may still have messages in flight.
        self._sequence = client.latest_sequence() + _ROOM_FOR_STRAGGLERS
        self._has_warned = self._has_warned_of_loss = False
        self._was_stale = self.lost_gradient = False

    @property
    def has_own_progress(self) -> bool:
        """Whether the latest push was too stale: the center lacks the worker's progress."""
        return self._was_stale and not self._rule.uses_gradients

    @property
    def latest_versions(self) -> Any:
        """Latest known version of each partition; the weights may have an older one."""
        return self._latest_versions

    def greet(self) -> None:
        """Check that the entire service is present.

        Raises:
            ConnectionError: if a process of the service does not answer in time.
            PermissionError: if a process refuses this worker.
        """
        self._client.greet()

    def signal(self, signal: Signal) -> int | None:
        """Send a signal to the rule; return the stage of training, None without a timely answer."""
        return self._client.signal(signal)

    def pull(self, exact: bool = False) -> list[Any]:
        """Fetch the center.

        Args:
            exact: whether to get all of its bits, regardless of the format of other messages.

        Raises:
            NoCenterError: if a part was restarted and has no center yet.
            ServiceLostError: if no answer arrives in time.
        """
        fallback = [tf.zeros([size]) for size in self._client.partitions.sizes]
        answer = self._client.pull(fallback, exact)
        statuses = answer.statuses.numpy()
        if (statuses != int(Status.OK)).any():
            raise _lost(statuses)
        self._latest_versions = answer.versions.numpy()
        return list(answer.partitions)

    def compress(self, ratio: float) -> None:
        """Send only the largest values from now on; earlier residuals are kept.

        Args:
            ratio: fraction of the values, if the service accepts such messages.
        """
        self._client.use_wire(TopKWire(ratio))

    def adopt(self, center: list[Any]) -> None:
        """Treat the center that was just pulled as the last one seen."""
        self.seen, self._residuals = center, None
        self._versions = self._latest_versions

    def after_absence(
        self, weights: list[Any], pending: Pending | None, num_workers: int
    ) -> list[Any]:
        """Return the weights to continue from when the service is back: `UpdateRule.after_absence`.

        Args:
            weights: the worker's current weights, for each partition.
            pending: the push sent before the service was lost, None for none.
            num_workers: number of workers that exchange with the service.
        """
        starts = self.seen if pending is None else pending.sent
        pairs = zip(weights, starts, strict=True)
        return [self._rule.after_absence(own, start, num_workers) for own, start in pairs]

    def send(self, weights: list[Any], samples: int) -> Pending:
        """Send the rule's message.

        Args:
            weights: the worker's weights, for each partition; the mean gradient for rules that send
                gradients.
            samples: number of samples behind the change.

        Returns:
            The push in flight.
        """
        messages, sent = outgoing(self._rule, weights, self.seen)
        if self._residuals is not None:
            messages = [m + r for m, r in zip(messages, self._residuals, strict=True)]
        self._sequence += 1
        versions = self._versions.copy()
        push = self._client.start_push(messages, versions, samples, self._sequence)
        return Pending(push, samples, versions, self._sequence, sent)

    def finish(self, pending: Pending, weights: list[Any]) -> list[Any]:
        """Wait for the answer and combine it with the current weights.

        A part whose push was too stale restarts from the center with the worker's own progress. A
        part whose push arrived after the end of training stays unchanged: the final center follows.

        Args:
            pending: the result of `send`; after a loss it may be passed again.
            weights: the worker's current weights, for each partition.

        Returns:
            The weights from which to continue.

        Raises:
            ServiceLostError: if a part does not answer in time; nothing changes then.
        """
        answer = self._final_answer(pending)
        statuses, versions = answer.statuses.numpy(), answer.versions.numpy()
        self._check_statuses(statuses)
        carried = [
            self._part(
                index, int(status), answer.partitions[index], pending.sent[index], weights[index]
            )
            for index, status in enumerate(statuses)
        ]
        taken = np.isin(statuses, (Status.OK, Status.REPEATED, Status.STALE))
        self._versions = np.where(taken, versions, self._versions)
        self._latest_versions = np.maximum(self._latest_versions, self._versions)
        self._residuals = self._left_over(statuses, answer)
        self._was_stale = bool((statuses == int(Status.STALE)).any())
        self._note_lost_gradient(statuses)
        return carried

    def _note_lost_gradient(self, statuses: Any) -> None:
        """Record a gradient that was too stale; resending it would be just as stale."""
        uses_gradients = self._rule.uses_gradients
        self.lost_gradient = uses_gradients and bool((statuses == int(Status.STALE)).all())
        if uses_gradients and self._was_stale and not self._has_warned_of_loss:
            self._has_warned_of_loss = True
            _logger.warning(
                "A gradient of this worker was more updates behind than staleness_bound, and is "
                "not used. If that happens often the worker adds nothing: give it a larger bound "
                "or a smaller period, or leave the bound out and damp (AsyncSGD damps_staleness)."
            )

    def _final_answer(self, pending: Pending) -> Any:
        """Return the final answer; rules with waiting workers may defer the turn several times.

        Accepted parts count once: the push is sent again with its number.
        """
        while True:
            answer = pending.push.answer(self.seen)
            statuses = answer.statuses.numpy()
            _check_answered(statuses)
            waiting = np.flatnonzero(statuses == int(Status.WAIT)).tolist()
            if not waiting:
                return answer
            pending.had_to_wait = True
            self._client.push_again(pending.push, self._in_turn(pending.push, waiting))

    def _in_turn(self, push: PendingPush, waiting: list[int]) -> list[int]:
        """Wait until it is the turn of some parts, and return these.

        It asks without values, because the link belongs to the worker whose turn it is. It asks all
        parts, because one whose service is gone must not go unnoticed while others say to wait.
        """
        pause, longest = _TURN_SECONDS
        while True:
            statuses = self._client.ask_turns(push, waiting)
            _check_answered(np.array(statuses))
            turns = zip(waiting, statuses, strict=True)
            if found := [index for index, status in turns if status != Status.WAIT]:
                return found
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def send_again(self, pending: Pending) -> None:
        """Send the untaken parts of a push again, with its old number.

        Answers of parts that took the push are kept: a new answer would be the current center, to
        which others have pushed since.
        """
        statuses = pending.push.answer(self.seen).statuses.numpy()
        again = np.flatnonzero(np.isin(statuses, (*_UNANSWERED, int(Status.WAIT))))
        self._client.push_again(pending.push, again.tolist())

    def meet_again(self, pending: Pending | None) -> None:
        """Wait until all parts answer after a loss; a push in flight is sent again.

        Args:
            pending: the unfinished result of `send`, None for none.

        Raises:
            ServiceLostError: if a part does not answer in time.
        """
        if pending is None:
            self.pull()
            return
        self.send_again(pending)
        self._final_answer(pending)

    def _check_statuses(self, statuses: Any) -> None:
        if np.isin(statuses, (Status.REFUSED, Status.UNKNOWN_CLIENT)).any():
            raise PermissionError(
                "The parameter service refused this worker's push. Received: statuses "
                f"{statuses.tolist()}. Use the same script, TF_CONFIG cluster and secret on every "
                "task."
            )
        if (statuses == int(Status.CLOSED)).any() and not self._has_warned:
            self._has_warned = True
            _logger.warning(
                "Training ended before this worker's last change came, which is not in the center. "
                "A larger end_seconds gives slow workers more time."
            )
        if (statuses == int(Status.NOT_FINITE)).any() and not self._has_warned:
            self._has_warned = True
            _logger.warning(DIVERGED)

    def _part(self, index: int, status: int, values: Any, sent: Any, weights: Any) -> Any:
        if status in (Status.OK, Status.REPEATED):
            new = self._rule.receive(weights, sent, values)
        elif status == Status.STALE:
            new = values + (weights - self.seen[index])
        else:
            return weights
        self.seen[index] = values
        return new

    def _left_over(self, statuses: Any, answer: Any) -> list[Any] | None:
        """Return the residual of a compressing format, to be sent with the next message.

        Untaken changes are still in the weights, except for earlier residuals.
        """
        if self._client.wire_is_exact:
            return None
        before = self._residuals or [tf.zeros_like(residual) for residual in answer.residuals]
        return [
            residual if status in (Status.OK, Status.REPEATED) else old
            for status, residual, old in zip(statuses, answer.residuals, before, strict=True)
        ]


def outgoing(rule: Any, progress: Sequence[Any], seen: Sequence[Any]) -> tuple[Any, Any]:
    """Return a worker's message for each partition, and the weights from which it continues.

    Args:
        rule: the update rule.
        progress: the worker's weights, or its mean gradient if the rule sends gradients.
        seen: the answer of its last exchange.
    """
    pairs = list(zip(progress, seen, strict=True))
    if rule.uses_gradients:  # the weights are unchanged since the last answer
        messages = [rule.message_of_gradient(gradient, s) for gradient, s in pairs]
        return messages, [rule.after_sending(s, s) for s in seen]
    messages = [rule.message(weights, s) for weights, s in pairs]
    return messages, [rule.after_sending(weights, s) for weights, s in pairs]


def connect(make: Any, wait_seconds: float, hint: str = "") -> Any:
    """Call `make` until the service is present; report a long wait once.

    Args:
        make: opens a connection; raises `ConnectionError` if there is no answer.
        wait_seconds: how long to try.
        hint: another possible cause, for waiting users.

    Raises:
        ConnectionError: if there is no answer in that time.
    """
    began = time.monotonic()
    says_so_after = _SILENT_SECONDS
    while True:
        try:
            return make()
        except ConnectionError as error:
            waited = time.monotonic() - began
            if waited > wait_seconds:
                raise
            if waited > says_so_after:
                says_so_after = wait_seconds
                _logger.warning(_WAITS, waited, wait_seconds, hint and f"{hint} ", error)
            time.sleep(_POLL_SECONDS)


@dataclasses.dataclass(frozen=True)
class Connection:
    """An async worker's connection to the service.

    Args:
        weights: connection of the model's weights.
        state: connection of its moving statistics, None without any.
        ledger: connection to the sample ledger.
        heartbeat: a second connection to the ledger, for another thread.
    """

    weights: CenterClient
    state: CenterClient | None
    ledger: LedgerClient
    heartbeat: LedgerClient


def open_connection(participant: Any, client: int) -> Connection:
    """Connect to weights, moving statistics and ledger of a service.

    Args:
        participant: the async worker.
        client: the worker's number among the service's clients.

    Raises:
        ConnectionError: if the service is absent, has not begun or is over.
        PermissionError: if the service refuses this worker.
    """
    options, vectors = participant.options, participant.vectors
    first = participant.strategy.cluster_config.service_address()
    common = {
        "credential": participant.credential,
        "client": client,
        "timeout_seconds": options.timeout_seconds,
    }
    ledger = LedgerClient(first, **common)
    addresses = _find_addresses(participant, ledger, first)
    weights = ParameterClient(
        addresses,
        vectors.weights.partitions,
        wire=options.wire_of(client - first_async_client(participant.strategy)),
        prefix=WEIGHTS_PREFIX,
        **common,
    )
    state = None
    if vectors.state is not None:
        client_of_state = ParameterClient(
            addresses, vectors.state.partitions, prefix=STATE_PREFIX, **common
        )
        state = CenterClient(client_of_state, participant.state_rule)
    center = CenterClient(weights, participant.rule)
    return Connection(center, state, ledger, LedgerClient(first, **common))


def _find_addresses(participant: Any, ledger: LedgerClient, first: str) -> list[str]:
    """Ask the first process of the service for the addresses of the others."""
    seconds = participant.options.timeout_seconds
    directory = FunctionClient(first, participant.credential, seconds)
    specs = (tf.TensorSpec([], tf.int32), tf.TensorSpec([], tf.string))
    try:
        facts = ledger.report(Presence.GONE)
        is_over = facts.stage == Stage.CLOSED and facts.training.run < participant.run
        answer = directory.ask(DIRECTORY, [tf.constant("")], specs)
    except ServiceLostError as error:
        raise ConnectionError(str(error)) from error
    addresses = bytes(answer[1].numpy()).decode()
    if is_over or not addresses:
        raise ConnectionError(
            f"The parameter service at {first} is there but does not train now. Received: "
            f"{'an ended training' if is_over else 'one that has not begun'}."
        )
    return addresses.split(",")


def _check_answered(statuses: Any) -> None:
    if np.isin(statuses, _UNANSWERED).any():
        raise _lost(statuses)


def _lost(statuses: Any) -> ServiceLostError:
    has_no_center = (statuses == int(Status.NO_CENTER)).any()
    return (NoCenterError if has_no_center else ServiceLostError)(
        "The parameter service did not answer in time. Received: statuses "
        f"{statuses.tolist()} (-1: no answer; {int(Status.NO_CENTER)}: restarted, and without "
        'center until its leader brings it). Its process may be gone; give on_service_loss="'
        'continue" to go on without it.'
    )
