"""A participant's exchange with the center: attached, in flight, lost and back."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np

from keras_het.asynchronous.exchange.participant import HybridOptions
from keras_het.asynchronous.parameter_service.client import (
    ADVICE,
    Answer,
    ParameterClient,
    PendingPush,
    ServiceLostError,
)
from keras_het.exchange.message import NO_ANSWER, Status, Vector
from keras_het.rules import UpdateRule

LARGEST_TRIES = 100
"""Pushes of the same change if others push in between, with a bound on staleness."""
_ROOM_FOR_STRAGGLERS = 1 << 20
_UNANSWERED = (NO_ANSWER, int(Status.NO_CENTER))
_QUESTIONS_IN_TIMEOUT = 4
_NOTHING = np.zeros(0, np.float32)
_LARGEST_PAUSE = 16.0  # in time-outs
LONGEST_WAIT_SECONDS = 0.5  # for an answer that is no longer needed
_TAKEN = (int(Status.OK), int(Status.REPEATED))
_TOO_LATE = (
    "Training ended before this worker's last change arrived, so the center lacks it. A larger "
    "shutdown_timeout_seconds gives slow workers more time."
)
_LOST_GRADIENT = (
    "A gradient of this worker was more updates behind than max_staleness, and is not used. If "
    "that happens often the worker adds nothing: give it a larger bound or a smaller period, or "
    "leave the bound out and damp (AsyncSGD staleness_damping)."
)
_DIVERGED = (
    "The parameter service rejected this worker's weights: they, or the center with them, would "
    "not be finite. Its training has diverged: lower the learning rate. "
    "keras.callbacks.TerminateOnNaN ends it."
)
_logger = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")


class NoCenterError(ServiceLostError):
    """A part of the service was restarted, and its leader has yet to restore the center."""


class ExchangeEngine:
    """The one state machine of all participants, whether their center is here or elsewhere.

    - Attached: the center was seen; a push may be in flight until its answer has been received,
      which counts once.
    - Lost (`is_lost`): a part did not answer in time. That is an error, after which the exchange is
      given up (`is_given_up`), or the participant trains on alone. A push in flight is kept.
    - Away (`is_away`): lost, and not heard from since. A thread asks; nothing else does.
    - Attached again: all parts have answered a push in flight, with its old number; only then
      the progress made alone is scaled by the rule, once.
    """

    def __init__(
        self,
        exchange: VectorExchange,
        ask: Callable[[], object],
        options: HybridOptions,
        name: str,
        note_loss: Callable[[ServiceLostError], None],
    ) -> None:
        self.exchange = exchange
        self.is_lost = self.is_given_up = False
        self.watch = ReturnWatch(ask, options.timeout_seconds)
        self._goes_on, self._name = options.goes_on_without_service, name
        self._note_loss = note_loss

    @property
    def is_away(self) -> bool:
        """Whether the service is lost and has not answered since; nothing waits for it then."""
        return self.is_lost and not self.watch.has_answered

    @property
    def has_answer(self) -> bool:
        """Whether something is in flight, and all of it is answered or will not be."""
        return self.exchange.pending is not None and self.exchange.pending.has_answer

    def attached_again(self, weights: list[Vector], num_participants: int) -> list[Vector]:
        """End the loss once all parts answer: a failed try must not scale progress again."""
        weights = self.exchange.after_absence(weights, num_participants)
        self.is_lost = False
        self.watch.attached()
        _logger.warning("The parameter service answers again.")
        return weights

    def attempt(self, ask: Callable[[], ResultT], otherwise: ResultT) -> ResultT:
        """Return an answer of the service, or something else while it is lost."""
        if not self.is_lost:
            with self.losing():
                return ask()
        return otherwise

    @contextlib.contextmanager
    def losing(self) -> Iterator[None]:
        """Where the service is lost, continue alone after this block, and ask until it answers."""
        try:
            yield
        except ServiceLostError as error:
            self._lose(error)
        except ConnectionError as error:  # as where a restarted process is offered the training
            self._lose(ServiceLostError(str(error)))

    def _lose(self, error: ServiceLostError) -> None:
        if not self._goes_on:
            self.is_given_up = True
            raise error
        self.watch.start()
        self._note_loss(error)
        if not self.is_lost:
            self.is_lost = True
            _logger.warning("%s %s continues alone.", str(error).removesuffix(ADVICE), self._name)


class VectorExchange:
    """The exchange of a participant's weights, and of its moving statistics, with the center."""

    # Values are lists of parts: first those of the weights.

    def __init__(
        self, transport: ParameterClient, rule: UpdateRule, state_rule: UpdateRule | None = None
    ) -> None:
        self.transport, self._rule = transport, rule
        self.num_weights = len(transport.partitions.sizes)
        num_others = transport.num_parts - self.num_weights
        self._rules = [rule] * self.num_weights + [state_rule or rule] * num_others
        self.seen: list[Vector] = []
        self._versions = np.zeros(transport.num_parts, np.int64)
        self.latest_versions = self._versions  # known ones; the weights may have older ones
        self.seen_pushes: list[Vector | None] = [None] * transport.num_parts
        """Numbers of all workers' latest pushes in `seen`, by partition; None before it is seen."""
        self._pulled_pushes = self.seen_pushes
        self._residuals = [_NOTHING] * transport.num_parts
        # An earlier process with this number may still have messages in flight.
        self._number = transport.latest_number() + _ROOM_FOR_STRAGGLERS
        self.pending: PendingPush | None = None
        self._warned: set[str] = set()
        self._was_stale = self.lost_gradient = False
        self.staleness = 0.0

    @property
    def has_own_progress(self) -> bool:
        """Whether the latest push was too stale: the center lacks the worker's progress."""
        return self._was_stale and not self._rule.uses_gradients

    def pull(self, exact: bool = False) -> list[Vector]:
        answer = self.transport.pull(exact)
        center = [values for values in answer.values if values is not None]
        if (answer.statuses != Status.OK).any() or len(center) != len(answer.values):
            raise _lost(answer)
        self.latest_versions = answer.versions
        self._pulled_pushes = answer.latest
        return center

    def attach(self) -> list[Vector]:
        """Fetch the center to start from; forget the push in flight."""
        self.seen = self.pull()
        self._residuals, self.pending = [_NOTHING] * len(self.seen), None
        self._versions, self.seen_pushes = self.latest_versions, self._pulled_pushes
        return list(self.seen)

    def after_absence(self, weights: list[Vector], num_workers: int) -> list[Vector]:
        starts = self.seen if self.pending is None else self.pending.sent
        pairs = zip(weights, starts[: self.num_weights], strict=True)
        return [self._rule.after_absence(own, start, num_workers) for own, start in pairs]

    def send(self, values: list[Vector], samples: int) -> PendingPush:
        """Send the rules' messages about all parts, or the first ones; continue from `sent`."""
        messages: list[Vector] = []
        sent: list[Vector] = []
        parts = zip(self._rules, values, self.seen, self._residuals, strict=False)
        for rule, own, seen, residual in parts:
            if rule.uses_gradients:  # the weights are unchanged since the last answer
                message, own = rule.message_of_gradient(own, seen), seen
            else:
                message = rule.message(own, seen)
            messages.append(message + residual if len(residual) else message)
            sent.append(rule.after_sending(own, seen))
        self._number += 1
        versions = self._versions[: len(sent)].tolist()
        self.pending = self.transport.start_push(messages, versions, samples, self._number)
        self.pending.sent = sent
        return self.pending

    def receive(self, values: list[Vector], answer: Answer | None = None) -> list[Vector]:
        """Take the answer in flight, if any; return the values from which to continue."""
        if self.pending is not None:
            answer = answer or self.pending.answer()
            values = self._combined(self.pending, answer, values)
            self.pending = None
        return values

    def _combined(self, push: PendingPush, answer: Answer, values: list[Vector]) -> list[Vector]:
        # A part whose push was too stale restarts from the center with the worker's own progress;
        # after the end of training it stays unchanged: the final center follows.
        _check_answered(answer)
        statuses, versions = answer.statuses, answer.versions
        self._warn_if(Status.CLOSED in statuses, _TOO_LATE)
        self._warn_if(Status.NOT_FINITE in statuses, _DIVERGED)
        stale, is_taken = statuses == int(Status.STALE), np.isin(statuses, _TAKEN)
        is_seen = stale | is_taken
        behind = np.maximum(versions - push.versions - is_taken, 0)[: self.num_weights]
        if (of_weights := is_seen[: self.num_weights]).any():
            self.staleness = float(behind[of_weights].mean())
        self._versions = self._versions.copy()
        self._versions[: len(statuses)][is_seen] = versions[is_seen]
        self.latest_versions = np.maximum(self.latest_versions, self._versions)
        values, self.seen_pushes = list(values), list(self.seen_pushes)
        for index, center in enumerate(answer.values):
            if is_taken[index]:  # what was not taken is still in the weights
                self._residuals[index] = push.residuals[index]
            if center is None:
                continue
            if stale[index]:
                values[index] = center + (values[index] - self.seen[index])
            else:
                rule, sent = self._rules[index], push.sent[index]
                values[index] = rule.receive(values[index], sent, center)
            self.seen[index], self.seen_pushes[index] = center, answer.latest[index]
        self._was_stale = bool(stale.any())
        # A gradient that was too stale would be just as stale if it was sent again.
        uses_gradients = self._rule.uses_gradients
        self.lost_gradient = uses_gradients and bool(stale[: self.num_weights].all())
        self._warn_if(uses_gradients and self._was_stale, _LOST_GRADIENT)
        return values

    def _warn_if(self, applies: bool, text: str) -> None:
        if applies and text not in self._warned:
            self._warned.add(text)
            _logger.warning(text)

    def meet_again(self) -> None:
        """Wait until all parts answer after a loss; a push in flight is sent again."""
        # Parts that took it keep their answers: new ones would be the center after others' pushes.
        if self.pending is None:
            self.pull()
            return
        statuses = self.pending.answer().statuses
        again = np.flatnonzero(np.isin(statuses, _UNANSWERED))
        self.transport.push_again(self.pending, again.tolist())
        _check_answered(self.pending.answer())


def _check_answered(answer: Answer) -> None:
    if np.isin(answer.statuses, _UNANSWERED).any():
        raise _lost(answer)


def _lost(answer: Answer) -> ServiceLostError:
    without_center = np.flatnonzero(answer.statuses == int(Status.NO_CENTER)).tolist()
    if without_center or answer.loss is None:
        return NoCenterError(
            "The parameter service was restarted, and has no center until its leader brings it. "
            f"Received: parts {without_center} without one.{ADVICE}"
        )
    return answer.loss


class Repeating(threading.Thread):
    """A thread that does something after each pause until that returns True, or it is stopped."""

    def __init__(self, do: Callable[[], bool], pause_seconds: float, name: str) -> None:
        super().__init__(name=f"keras_het-{name}", daemon=True)
        self._do, self._pause_seconds, self._end = do, pause_seconds, threading.Event()
        self.start()

    def run(self) -> None:
        while not self._end.wait(self._pause_seconds) and not self._do():
            pass

    def stop(self, longest_wait_seconds: float | None = LONGEST_WAIT_SECONDS) -> None:
        """Stop; return once nothing is in progress, or sooner."""
        self._end.set()
        self.join(longest_wait_seconds)


class ReturnWatch:
    """A thread that polls after each loss until there is an answer; no step waits for it."""

    # A link may carry questions and no weights: each further loss doubles the pause.

    def __init__(self, ask: Callable[[], object], timeout_seconds: float) -> None:
        self._ask = ask
        self._first_pause = self._pause = timeout_seconds / _QUESTIONS_IN_TIMEOUT
        self._largest_pause = _LARGEST_PAUSE * timeout_seconds
        self._lock = threading.Lock()
        self._answered, self._is_stopped = threading.Event(), False
        self._thread: Repeating | None = None

    @property
    def has_answered(self) -> bool:
        return self._answered.is_set()

    def start(self) -> None:
        """Start polling, unless it is already in progress; call this at each loss."""
        with self._lock:  # a thread other than that of the steps may claim batches
            is_asking = self._thread is not None and not self.has_answered
            if is_asking or self._is_stopped:
                return
            self._answered.clear()
            pause, self._pause = self._pause, min(2 * self._pause, self._largest_pause)
            self._thread = Repeating(self._is_answered, pause, "lost")

    def attached(self) -> None:
        """Record that the service is in use again: the next loss is a new one."""
        self._pause = self._first_pause

    def stop(self) -> None:
        """Stop polling and return soon; the result of a pending question does not count."""
        with self._lock:
            self._is_stopped = True
        if self._thread is not None:
            self._thread.stop()

    def _is_answered(self) -> bool:
        try:
            self._ask()
        except ServiceLostError:
            return False
        except Exception as error:  # such as a refusal: it recurs when the training attaches
            _logger.debug("The service has answered with an error: %s", error)
        if not self._is_stopped:
            self._answered.set()
        return True
