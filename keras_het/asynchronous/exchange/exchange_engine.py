"""A participant's exchange with the center: attached, in flight, lost and back."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
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
_LARGEST_PAUSE = 16.0  # in time-outs
_LONGEST_WAIT_SECONDS = 0.5  # for a question whose answer is no longer needed
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

    - Attached: the center was seen; a push of weights and one of moving statistics may be in
      flight, each until its answer has been received, which counts once.
    - Lost (`is_lost`): a part did not answer in time. That is an error, after which the exchange is
      given up (`is_given_up`), or the participant trains on alone. Pushes in flight are kept.
    - Away (`is_away`): lost, and not heard from since. A thread asks; nothing else does.
    - Attached again: all parts have answered, pushes in flight again, with their old numbers; only
      then the progress made alone is scaled by the rule, once.
    """

    def __init__(
        self,
        exchanges: Sequence[VectorExchange],
        ask: Callable[[], object],
        options: HybridOptions,
        name: str,
        note_loss: Callable[[ServiceLostError], None],
    ) -> None:
        self.exchanges = exchanges
        self.weights, *state = exchanges
        self.state = state[0] if state else None
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
        pushes = [each.pending.push for each in self.exchanges if each.pending is not None]
        return bool(pushes) and all(push.has_answer for push in pushes)

    def attach(self) -> list[list[Vector]]:
        """Fetch the center of weights, and of moving statistics, to start from; forget pushes."""
        centers = [each.pull() for each in self.exchanges]
        for each, center in zip(self.exchanges, centers, strict=True):
            each.adopt(center)
        return centers

    def send(self, values: list[list[Vector]], samples: int) -> None:
        """Send weights and moving statistics; `values` become those to continue from."""
        for place, each in enumerate(self.exchanges):
            pending = each.send(values[place], samples)
            values[place] = pending.sent
            pending.push.check()

    def receive(self, values: list[list[Vector]]) -> None:
        """Take the answers in flight into `values`, each before the next: one may be lost."""
        for place, each in enumerate(self.exchanges):
            values[place] = each.receive(values[place])

    def meet_again(self) -> None:
        for each in self.exchanges:
            each.meet_again()

    def attached_again(self, weights: list[Vector], num_participants: int) -> list[Vector]:
        """End the loss once all parts answer: a failed try must not scale progress again."""
        weights = self.weights.after_absence(weights, num_participants)
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


@dataclasses.dataclass
class Pending:
    """A push in flight; it can be sent again and counts once."""

    push: PendingPush
    samples: int
    versions: np.ndarray
    sent: list[Vector]


class VectorExchange:
    """The exchange of one participant's vectors with the center."""

    def __init__(self, transport: ParameterClient, rule: UpdateRule) -> None:
        self.transport, self._rule = transport, rule
        self.seen: list[Vector] = []
        self._versions = np.zeros(len(transport.partitions.sizes), np.int64)
        self.latest_versions = self._versions  # known ones; the weights may have older ones
        self.seen_pushes: list[Vector | None] = [None] * len(self._versions)
        """Numbers of all workers' latest pushes in `seen`, by partition; None before it is seen."""
        self._pulled_pushes = self.seen_pushes
        self._residuals: list[Vector] | None = None
        # An earlier process with this number may still have messages in flight.
        self._number = transport.latest_number() + _ROOM_FOR_STRAGGLERS
        self.pending: Pending | None = None
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

    def adopt(self, center: list[Vector]) -> None:
        """Treat the center that was just pulled as the last one seen; forget the push in flight."""
        self.seen, self._residuals, self.pending = center, None, None
        self._versions, self.seen_pushes = self.latest_versions, self._pulled_pushes

    def after_absence(self, weights: list[Vector], num_workers: int) -> list[Vector]:
        starts = self.seen if self.pending is None else self.pending.sent
        pairs = zip(weights, starts, strict=True)
        return [self._rule.after_absence(own, start, num_workers) for own, start in pairs]

    def send(self, weights: list[Vector], samples: int) -> Pending:
        """Send the rule's message; the worker continues from the pending push's `sent`."""
        rule, pairs = self._rule, list(zip(weights, self.seen, strict=True))
        if rule.uses_gradients:  # the weights are unchanged since the last answer
            messages = [rule.message_of_gradient(gradient, seen) for gradient, seen in pairs]
            sent = [rule.after_sending(seen, seen) for seen in self.seen]
        else:
            messages = [rule.message(own, seen) for own, seen in pairs]
            sent = [rule.after_sending(own, seen) for own, seen in pairs]
        if self._residuals is not None:
            messages = [m + r for m, r in zip(messages, self._residuals, strict=True)]
        self._number += 1
        versions = self._versions.copy()
        push = self.transport.start_push(messages, versions.tolist(), samples, self._number)
        self.pending = Pending(push, samples, versions, sent)
        return self.pending

    def receive(self, weights: list[Vector], answer: Answer | None = None) -> list[Vector]:
        """Take the answer in flight, if any; return the weights from which to continue."""
        if self.pending is not None:
            answer = answer or self.pending.push.answer()
            weights = self._combined(self.pending, answer, weights)
            self.pending = None
        return weights

    def _combined(self, pending: Pending, answer: Answer, weights: list[Vector]) -> list[Vector]:
        """Combine an answer with the current weights."""
        # A part whose push was too stale restarts from the center with the worker's own progress;
        # after the end of training it stays unchanged: the final center follows.
        statuses, versions = answer.statuses, answer.versions
        _check_answered(answer)
        self._warn_if(Status.CLOSED in statuses, _TOO_LATE)
        self._warn_if(Status.NOT_FINITE in statuses, _DIVERGED)
        carried = [
            self._part(index, int(status), values, pending.sent[index], weights[index])
            for index, (status, values) in enumerate(zip(statuses, answer.values, strict=True))
        ]
        taken = np.isin(statuses, (Status.OK, Status.REPEATED, Status.STALE))
        if taken.any():
            behind = (versions - pending.versions)[taken] - (statuses[taken] != int(Status.STALE))
            self.staleness = float(np.maximum(behind, 0).mean())
        self._versions = np.where(taken, versions, self._versions)
        self.latest_versions = np.maximum(self.latest_versions, self._versions)
        both = zip(answer.latest, self.seen_pushes, strict=True)
        self.seen_pushes = [old if new is None else new for new, old in both]
        self._residuals = self._left_over(pending.push, answer)
        stale = statuses == int(Status.STALE)
        self._was_stale = bool(stale.any())
        # A gradient that was too stale would be just as stale if it was sent again.
        self.lost_gradient = self._rule.uses_gradients and bool(stale.all())
        self._warn_if(self._rule.uses_gradients and self._was_stale, _LOST_GRADIENT)
        return carried

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
        statuses = self.pending.push.answer().statuses
        again = np.flatnonzero(np.isin(statuses, _UNANSWERED))
        self.transport.push_again(self.pending.push, again.tolist())
        _check_answered(self.pending.push.answer())

    def _part(
        self, index: int, status: int, values: Vector | None, sent: Vector, weights: Vector
    ) -> Vector:
        if values is None:
            return weights
        if status == Status.STALE:
            new = values + (weights - self.seen[index])
        else:
            new = self._rule.receive(weights, sent, values)
        self.seen[index] = values
        return new

    def _left_over(self, push: PendingPush, answer: Answer) -> list[Vector] | None:
        """Return what a compressing format has left; changes not taken are still in the weights."""
        if self.transport.wire.is_exact:
            return None
        before = self._residuals or [np.zeros_like(residual) for residual in push.residuals]
        left = zip(answer.statuses, push.residuals, before, strict=True)
        return [residual if status in _TAKEN else old for status, residual, old in left]


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


class ReturnWatch:
    """A thread that polls after each loss until there is an answer; no step waits for it."""

    # A link may carry questions and no weights: each further loss doubles the pause.

    def __init__(self, ask: Callable[[], object], timeout_seconds: float) -> None:
        self._ask = ask
        self._first_pause = timeout_seconds / _QUESTIONS_IN_TIMEOUT
        self._largest_pause = _LARGEST_PAUSE * timeout_seconds
        self._pause = self._first_pause
        self._lock = threading.Lock()
        self._answered, self._stopped = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def has_answered(self) -> bool:
        return self._answered.is_set()

    def start(self) -> None:
        """Start polling, unless it is already in progress; call this at each loss."""
        with self._lock:  # a thread other than that of the steps may claim batches
            is_asking = self._thread is not None and not self._answered.is_set()
            if is_asking or self._stopped.is_set():
                return
            self._answered.clear()
            pause, self._pause = self._pause, min(2 * self._pause, self._largest_pause)
            self._thread = threading.Thread(
                target=self._ask_until_answered, args=(pause,), name="keras_het-lost", daemon=True
            )
            self._thread.start()

    def attached(self) -> None:
        """Record that the service is in use again: the next loss is a new one."""
        self._pause = self._first_pause

    def stop(self) -> None:
        """Stop polling and return soon; the result of a pending question does not count."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(_LONGEST_WAIT_SECONDS)

    def _ask_until_answered(self, pause: float) -> None:
        while not self._stopped.wait(pause):
            try:
                self._ask()
            except ServiceLostError:
                continue
            except Exception as error:  # such as a refusal: it recurs when the training attaches
                _logger.debug("The service has answered with an error: %s", error)
            if not self._stopped.is_set():
                self._answered.set()
            return
