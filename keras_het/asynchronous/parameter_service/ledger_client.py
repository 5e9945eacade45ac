"""A participant's side of the ledger of batches and samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np

from keras_het.asynchronous.parameter_service.channel import Channel, ServiceLostError, result_of
from keras_het.asynchronous.parameter_service.sample_ledger import (
    NO_CHANGE,
    PACE_NUMBERS,
    Presence,
    Stage,
    TrainingFacts,
)
from keras_het.exchange.message import Kind, Message, Vector
from keras_het.exchange.status import Status

_OVERVIEW_NUMBERS = 6
_ROOM_FOR_STRAGGLERS = 1 << 20


@dataclasses.dataclass(frozen=True)
class LedgerFacts:
    """The ledger's facts about training."""

    stage: Stage
    epoch: int
    training: TrainingFacts


class LedgerConnection:
    """One participant's connection to a `SampleLedger`; the channel knows which one it is.

    Reports of samples have numbers. One whose answer was lost is repeated unchanged before the
    next; some of an earlier process of the same worker may still be in flight, so that numbers
    begin some way above the last one that the ledger knows.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._waiting = 0  # samples in no report yet
        self._open: tuple[int, int] | None = None  # a report without an answer
        self._latest_report: int | None = None

    def claim(self, epoch: int, count: int = 1) -> tuple[Status, int, int]:
        return self.answer_to(self.start_claim(epoch, count))

    def start_claim(self, epoch: int, count: int = 1) -> Future[Message]:
        return self._channel.start(Message(Kind.CLAIM, (epoch, count)))

    def answer_to(self, claim: Future[Message]) -> tuple[Status, int, int]:
        status, first, granted = result_of(claim, self._channel).numbers
        return Status(status), first, granted

    def report(self, presence: Presence, used: int = 0) -> LedgerFacts:
        self.add_used(used)
        facts = self._report(presence)
        while self._has_samples:
            facts = self._report(presence)
        return facts

    def add_used(self, samples: int) -> None:
        self._waiting += samples

    def _report(self, presence: Presence) -> LedgerFacts:
        (facts,) = self._ask(Message(Kind.REPORT, (*self._next_report(), presence)))
        stage, epoch, *numbers, latest = facts.tolist()
        self._note_answer(latest)
        return LedgerFacts(Stage(stage), epoch, TrainingFacts(*numbers))

    @property
    def _has_samples(self) -> bool:
        return self._open is not None or self._waiting > 0

    def _next_report(self) -> tuple[int, int]:
        """Return number and samples of the next report; zeros if there is nothing to count."""
        if self._open is None and self._waiting and self._latest_report is not None:
            self._latest_report += 1
            self._open, self._waiting = (self._latest_report, self._waiting), 0
        return self._open or (0, 0)

    def _note_answer(self, latest: int) -> None:
        if self._latest_report is None:
            self._latest_report = latest + _ROOM_FOR_STRAGGLERS
        self._open = None

    def pace(self, pace: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
        request = Message(Kind.PACE, (), (np.array(pace, np.float64),))
        paces, silence = self._ask(request)
        return paces.reshape(-1, PACE_NUMBERS), silence

    def close(self) -> None:
        self._channel.close()

    def _ask(self, request: Message) -> tuple[Vector, ...]:
        return self._channel.ask(request).vectors


class LeaderLedger(LedgerConnection):
    """The leader's side: it also tells the facts of training, and hears of all participants."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel)
        self._stage, self._epoch = Stage.STARTING, 0
        self._training = TrainingFacts(0)
        self._latest = np.zeros([0, _OVERVIEW_NUMBERS])
        self._is_kept = False

    def start_epoch(self, epoch: int, training: TrainingFacts) -> None:
        self._epoch, self._training = epoch, training

    def set_stage(self, stage: Stage) -> None:
        self._stage = stage

    def tell(self, taken_until: int = 0) -> None:
        self._lead(self._stage, taken_until)

    def is_handed_out(self, epoch: int) -> bool:
        return bool(epoch == self._epoch and self._lead()[0, 4] <= 0)

    def tell_used(self) -> None:
        """Report all stored samples to the ledger, which counts each once."""
        while self._has_samples and not self._is_kept:
            self._lead()

    def present(self, presence: Presence, within_seconds: float) -> list[int]:
        overview = self._lead()
        chosen = (overview[:, 0] == int(presence)) & (overview[:, 1] < within_seconds)
        return [int(participant) for participant in np.flatnonzero(chosen)]

    @property
    def claimed(self) -> np.ndarray:
        """Global batches handed out to each participant."""
        return self._lead()[:, 2].astype(np.int64)

    @property
    def used(self) -> np.ndarray:
        """Number of samples that each participant has used."""
        return self._lead()[:, 3].astype(np.int64)

    def keep(self) -> None:
        """Stop asking and keep the last answer for when the other process is gone."""
        self._is_kept = True

    def _lead(self, stage: int = NO_CHANGE, taken_until: int = 0) -> np.ndarray:
        if not self._is_kept:
            facts = np.array([stage, taken_until, self._epoch, *self._training], np.int64)
            (overview,) = self._ask(Message(Kind.LEAD, self._next_report(), (facts,)))
            self._latest = overview.reshape(-1, _OVERVIEW_NUMBERS)
            self._note_answer(int(self._latest[0, 5]))
        return self._latest


class EarlyClaim:
    """A request for one batch ahead; a late request would queue behind weights on the link."""

    def __init__(self, ledger: LedgerConnection) -> None:
        self._ledger = ledger
        self._epoch = -1
        self._answer: Future[Message] | None = None
        self._is_of_lost_service = False

    def ask(self, epoch: int) -> None:
        if self._answer is None:
            self._epoch, self._answer = epoch, self._ledger.start_claim(epoch)

    def service_lost(self) -> None:
        """Record that the answer to a pending question may never arrive."""
        self._is_of_lost_service = self._answer is not None

    def take(self, epoch: int, after: int) -> tuple[Status, int, int]:
        answer, self._answer = self._answer, None
        is_doubtful, self._is_of_lost_service = self._is_of_lost_service, False
        if answer is None or self._epoch != epoch:
            return self._ledger.claim(epoch)
        try:
            status, first, granted = self._ledger.answer_to(answer)
        except ServiceLostError:
            if not is_doubtful:
                raise
            return self._ledger.claim(epoch)
        if status != Status.OK or (granted and first <= after):
            return self._ledger.claim(epoch)
        return status, first, granted
