"""A participant's exchange with the center: attached, in flight, lost and back."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import tensorflow as tf

from keras_het.asynchronous.center.return_watch import ReturnWatch
from keras_het.asynchronous.center.vector_exchange import Pending, VectorExchange
from keras_het.asynchronous.exchange.participant import HybridOptions
from keras_het.asynchronous.parameter_service.ledger_connection import ServiceLostError

_logger = logging.getLogger("keras_het")
ResultT = TypeVar("ResultT")


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
        weights: VectorExchange,
        state: VectorExchange | None,
        ask: Callable[[], object],
        options: HybridOptions,
        name: str,
        note_loss: Callable[[ServiceLostError], None],
    ) -> None:
        self.weights, self.state = weights, state
        self.pending: Pending | None = None
        self.pending_state: Pending | None = None
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
        pending = [each.push for each in (self.pending, self.pending_state) if each is not None]
        return bool(pending) and all(push.has_answer for push in pending)

    def attach(self) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Fetch the center of weights and moving statistics, from which to start; forget pushes."""
        weights = self.weights.pull()
        state = [] if self.state is None else self.state.pull()
        self.weights.adopt(weights)
        if self.state is not None:
            self.state.adopt(state)
        self.pending = self.pending_state = None
        return weights, state

    def send(self, weights: list[tf.Tensor], samples: int) -> list[tf.Tensor]:
        """Send weights; return those to continue from while they travel."""
        self.pending = self.weights.send(weights, samples)
        return self.pending.sent

    def send_state(self, state: list[tf.Tensor], samples: int) -> None:
        """Send moving statistics."""
        if self.state is not None:
            self.pending_state = self.state.send(state, samples)

    def watch_answers(self) -> None:
        """Wait for what is in flight in the background; `has_answer` is valid from now on."""
        for each in (self.pending, self.pending_state):
            if each is not None:
                each.push.watch()

    def receive(self, weights: list[tf.Tensor]) -> list[tf.Tensor]:
        """Wait for the answer in flight, if any; return the weights from which to continue."""
        if self.pending is not None:
            weights = self.weights.finish(self.pending, weights)
            self.pending = None
        return weights

    def receive_state(self, state: list[tf.Tensor]) -> list[tf.Tensor]:
        """Wait for the answer in flight, if any; return moving statistics to continue from."""
        if self.pending_state is not None and self.state is not None:
            state = self.state.finish(self.pending_state, state)
            self.pending_state = None
        return state

    def exchange_state(self, state: list[tf.Tensor], samples: int) -> list[tf.Tensor]:
        """Exchange moving statistics and wait; what is lost in between is not sent again."""
        if self.state is None:
            return state
        return self.state.finish(self.state.send(state, samples), state)

    def meet_again(self) -> None:
        """Wait until all parts answer after a loss; pushes in flight are sent again."""
        self.weights.meet_again(self.pending)
        if self.state is not None:
            self.state.meet_again(self.pending_state)

    def attached_again(self, weights: list[tf.Tensor], num_participants: int) -> list[tf.Tensor]:
        """End the loss once all parts answer: a failed try must not scale progress again."""
        weights = self.weights.after_absence(weights, self.pending, num_participants)
        self.is_lost = False
        self.watch.attached()
        _logger.warning("The parameter service answers again.")
        return weights

    def attempt(self, ask: Callable[[], ResultT], otherwise: ResultT) -> ResultT:
        """Return an answer of the service, or something else while it is lost."""
        if self.is_lost:
            return otherwise
        try:
            return ask()
        except ServiceLostError as error:
            self.lose(error)
            return otherwise

    def lose(self, error: ServiceLostError) -> None:
        """Go on alone, and ask until the service answers."""
        if not self._goes_on:
            self.is_given_up = True
            raise error
        self.watch.start()
        self._note_loss(error)
        if not self.is_lost:
            self.is_lost = True
            _logger.warning("%s %s goes on alone.", error, self._name)
