"""An async worker's side: independent training with periodic exchanges with the service."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import time
from collections import deque
from typing import TYPE_CHECKING

import keras

from keras_het.asynchronous.exchange.claims import AsyncClaims
from keras_het.asynchronous.exchange.connection import connect, open_connection
from keras_het.asynchronous.exchange.exchange_engine import (
    LARGEST_TRIES,
    LONGEST_WAIT_SECONDS,
    ExchangeEngine,
    NoCenterError,
    Repeating,
)
from keras_het.asynchronous.exchange.participant import (
    HybridOptions,
    Participant,
    first_async_participant,
)
from keras_het.asynchronous.parameter_service.client import ServiceLostError
from keras_het.asynchronous.parameter_service.sample_ledger import (
    LedgerConnection,
    Presence,
    Stage,
    TrainingFacts,
)
from keras_het.exchange.message import Status, Vector
from keras_het.strategy.cluster.cluster_config import config_of

if TYPE_CHECKING:
    from keras_het.strategy.heterogeneous_strategy import HeterogeneousStrategy

_logger = logging.getLogger(__name__)
_POLL_SECONDS = 0.02
_BEATS_IN_TIMEOUT = 4
_HAS_IT_ENDED = "If the training has ended already, end this task."


class AsyncWorker(Participant):
    """A worker that takes batches of the epoch at its own pace, without holding up others."""

    _engine: ExchangeEngine
    _ledger: LedgerConnection
    _claims: AsyncClaims | None
    _heartbeat: Repeating | None = None  # once joined

    def __init__(
        self, model: keras.Model, strategy: HeterogeneousStrategy, options: HybridOptions
    ) -> None:
        super().__init__(model, strategy, options)
        self._worker = int(config_of(strategy).task_index)
        self._number = first_async_participant(strategy) + self._worker
        self._opened = contextlib.ExitStack()
        self._epoch = -1
        self._unreported = 0
        self._latest_batch = -1
        self._steps_at_hand = 0  # of this pass, with batches available
        self._planned_period: int | None = None
        self._num_parts = self._count_parts()
        self._warn_of_unused_batches()

    def start_epoch(self, epoch: int) -> None:
        """Connect before the first epoch; continue an epoch that is not used up."""
        if self._heartbeat is None:
            self._join()
        if self._claims is None:
            epoch = max(epoch, self._epoch_of_the_group())
        elif not self._claims.is_exhausted:
            epoch = self._epoch
        else:  # Keras may have counted several of its epochs in one of these: skip none
            epoch = max(self._epoch + 1, self._epoch_of_the_group())
        self._epoch, self._latest_batch = epoch, -1
        left_over = deque() if self._claims is None else self._claims.left_over
        self._steps_at_hand = len(left_over)
        self._claims = AsyncClaims(
            self.passes_before(epoch),
            self._num_parts,
            self._next_batch,
            self.num_batches,
            left_over,
        )

    def _epoch_of_the_group(self) -> int:
        if not self._engine.is_away:
            with self._engine.losing():
                return self._report(Presence.TRAINING).epoch
        return 0

    @property
    def period(self) -> int:
        return self._planned_period or self.options.period

    def steps_done(self, steps: int, samples: int) -> None:
        self._pace.computed(steps, samples)
        self._steps += steps
        self._samples += samples
        self._unreported += samples
        self._ask_ahead()
        if self._steps < self.period:
            self._take_early()
            return
        self._steps = 0
        if self._engine.is_away:
            return
        self.check_rate()
        with self._pace.exchanging(), self._engine.losing():
            self._exchange()

    def _exchange(self) -> None:
        self._attach_again()
        self._receive()
        if self.options.waits_for_answer:  # the next steps must start from the new weights
            self._send()
            self._receive()
            self._report(Presence.TRAINING)
        else:  # short messages first: they would wait behind the weights on a slow link
            self._report(Presence.TRAINING)
            self._send()
        if self._pace.is_due and (self.options.adapts_period or self.shows_paces):
            self._tell_pace()

    def _take_early(self) -> None:
        """Continue from the answer on arrival: older weights make staler steps."""
        if not self._engine.is_lost and self._engine.has_answer:
            with self._engine.losing(), self._pace.taking_early():
                self._receive()

    def _tell_pace(self) -> None:
        """Report this worker's pace, and plan by all paces if its period adapts."""
        adapts = self.options.adapts_period
        if adapts:
            self._receive(measures=True)
        if (pace := self._pace.pace) is None:
            return
        found = self._ledger.pace(pace._replace(staleness=self._engine.exchange.staleness))
        if adapts:
            steps = self.num_batches * self._num_parts
            self._planned_period = self.period_for(*found, self._number, steps)

    def meet_center(self) -> list[Vector]:
        """Send unsent progress and wait for the answer; own weights without a service."""
        if self._engine.is_away:
            return self.vectors.weights.read()
        return self._meet(sends=not self.rule.uses_gradients)

    def _meet(self, sends: bool) -> list[Vector]:
        with self._engine.losing():
            self._attach_again()
            self._receive()
            for _ in range(LARGEST_TRIES if sends else 0):
                if not (self._samples or self._engine.exchange.has_own_progress):
                    break
                self._steps = 0
                self._send()
                self._receive()
            return self._engine.exchange.pull()[: self.vectors.num_weights]
        return self.vectors.weights.read()

    def end(self) -> None:
        """Send the last change, wait for the sync group's end, and fetch the center."""
        self._meet(sends=True)  # partial gradients too, which are final now
        try:
            with self._engine.losing():
                if self.rule.may_wait and not self._engine.is_lost:
                    self._engine.exchange.transport.leave(self._number)
                self._wait_for_the_end()
        finally:
            self.leave()

    def leave(self) -> None:
        """Stop reporting this worker's presence and polling a lost service."""
        self._opened.close()

    def _wait_for_the_end(self) -> None:
        # From here on the worker waits: a late report must not say that it trains.
        if self._heartbeat is not None:
            self._heartbeat.stop(LONGEST_WAIT_SECONDS if self._engine.is_lost else None)
        facts = self._report(Presence.WAITING)
        while facts.stage != Stage.CLOSED:
            time.sleep(_POLL_SECONDS)
            facts = self._report(Presence.WAITING)
        self.vectors.write(self._engine.exchange.pull(exact=True))
        self._report(Presence.GONE)

    def _join(self) -> None:
        self.rule = self.options.rule.for_steps_of(1 / self._num_parts)
        seconds = self.options.startup_timeout_seconds
        connection = connect(lambda: open_connection(self, self._number), seconds, _HAS_IT_ENDED)
        self._opened.callback(connection.close)
        exchange, self._ledger = connection.exchange, connection.ledger
        ask = exchange.transport.greet
        self._engine = ExchangeEngine(exchange, ask, self.options, "Training", self._note_loss)
        self._opened.callback(self._engine.watch.stop)
        facts = self._report(Presence.TRAINING)
        self._check_same_data(facts)
        # After a fit or a backup, the leader may have made another number of passes.
        self.first_pass = facts.first_pass
        interval = self.options.timeout_seconds / _BEATS_IN_TIMEOUT
        beat = functools.partial(report_alive, connection.heartbeat)
        self._heartbeat = Repeating(beat, interval, "alive")
        self._opened.callback(self._heartbeat.stop)
        connect(self._start_from_center, seconds)
        _logger.info("Async worker %d trains from epoch %d on.", self._number, facts.epoch + 1)

    def _start_from_center(self) -> None:
        try:
            self.vectors.write(self._engine.exchange.attach())
        except NoCenterError as error:  # its leader restores the center: ask again later
            raise ConnectionError(str(error)) from error

    def _check_same_data(self, facts: TrainingFacts) -> None:
        received = (self.num_batches, self.fingerprint)
        expected = (facts.num_batches, facts.fingerprint)
        # The hash belongs to the latest pass; after a fit in which this worker passed over the data
        # less often than the group, passes differ, and with them the orders of a shuffle.
        may_compare = facts.first_pass == self.first_pass and 0 not in (received[1], expected[1])
        if received[0] != expected[0] or (may_compare and received[1] != expected[1]):
            raise ValueError(
                "This async worker's data is not the sync group's, so that they cannot share an "
                f"epoch. Received: {received[0]} batches, hash {received[1]}; the group has "
                f"{expected[0]} batches, hash {expected[1]}. Use the same data and batch size on "
                "every task, and give shuffle() a seed."
            )

    def _count_parts(self) -> int:
        """Return the number of steps that a global batch is cut into."""
        whole = int(self.data.global_batch_size or 0)
        size = self.options.async_batch_size
        if size is None:
            config = config_of(self.strategy)
            group = len(config.workers) + (config.chief is not None)
            return max(group, 1)
        if not whole:
            raise ValueError(
                "async_batch_size cuts global batches, whose size must be known. Received: "
                f"async_batch_size={size} and data that does not end in batch()."
            )
        return max(1, math.ceil(whole / size))

    def _warn_of_unused_batches(self) -> None:
        """Warn that Keras ends an epoch after as many steps as there are batches."""
        parts, workers = self._num_parts, self.strategy.num_async_workers
        if not config_of(self.strategy).has_sync_group and parts > workers:
            _logger.warning(
                "Keras ends an epoch after %d steps, and a batch takes %d of them with "
                "async_batch_size=%s: %d async workers alone use at most %d %% of the data. Make "
                "the batches of the dataset smaller instead.",
                self.num_batches,
                parts,
                self.options.async_batch_size,
                workers,
                100 * workers // parts,
            )

    def _next_batch(self) -> int | None:
        batch = self._claim()
        if batch is None:
            return None
        self._latest_batch = batch
        self._steps_at_hand += self._num_parts
        if self._num_parts == 1:
            self._ask_ahead()
        return batch

    def _ask_ahead(self) -> None:
        """Ask for the next batch while training on the last part of the current one."""
        # Keras ends a pass after as many steps as batches: another one would be left over.
        claims = self._claims
        if claims is None or claims.is_exhausted or self._engine.is_lost:
            return
        is_needed = max(self._latest_batch + 1, self._steps_at_hand) < self.num_batches
        if is_needed and len(claims.left_over) <= 1:
            self._ledger.ask_ahead(self._epoch)

    def _claim(self) -> int | None:
        """Return the next batch of the epoch, None if there is none; without a service, of all."""
        while not self._engine.is_lost:
            with self._engine.losing():
                status, first, granted = self._ledger.take(self._epoch, self._latest_batch)
                if status == Status.OK:
                    return first if granted else None
                stage = self._report(Presence.TRAINING).stage
                if stage in (Stage.ENDING, Stage.CLOSED):
                    self.model.stop_training = True
                    return None
                time.sleep(_POLL_SECONDS)
        following = self._latest_batch + 1
        return following if following < self.num_batches else None

    def _send(self) -> None:
        values = self.vectors.read(self.progress())
        pending = self._engine.exchange.send(values, self._samples)
        self._samples = 0
        self._pace.sent()
        pending.check()  # the next message would wait for a lost service once more

    def _receive(self, measures: bool = False) -> None:
        """Wait for the answer in flight, if any, and continue from it."""
        exchange = self._engine.exchange
        pending = exchange.pending
        if pending is None:
            return
        with self._pace.waiting(measures):
            answer = pending.answer()
        # Where steps only sum gradients, the weights are still those that were seen.
        seen = exchange.seen[: exchange.num_weights] if self.rule.uses_gradients else None
        self.vectors.write(exchange.receive(self.vectors.read(seen), answer))
        if exchange.lost_gradient:  # not below 0: a claim may have reported them
            self._unreported = max(0, self._unreported - pending.samples)

    def _attach_again(self) -> None:
        """Reconnect to the service after a loss; a push in flight is sent again."""
        if not self._engine.is_lost:
            return
        if self._report(Presence.TRAINING).stage == Stage.STARTING:
            raise ServiceLostError("The parameter service was restarted, and has no leader yet.")
        self._engine.exchange.meet_again()
        own = self.vectors.weights.read()
        self.vectors.weights.write(self._engine.attached_again(own, self.num_participants))

    def _report(self, presence: Presence) -> TrainingFacts:
        used, self._unreported = self._unreported, 0
        return self._ledger.report(presence, used)

    def _note_loss(self, error: ServiceLostError) -> None:
        self._ledger.service_lost()


def report_alive(ledger: LedgerConnection) -> bool:
    """Report that the worker trains; return whether it need not do so again."""
    try:
        ledger.report(Presence.TRAINING)
    except (ServiceLostError, PermissionError) as error:
        return isinstance(error, PermissionError)  # the worker notices a loss at its next exchange
    return False
