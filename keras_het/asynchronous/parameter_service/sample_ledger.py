"""The ledger that hands out global batches and counts samples."""

from __future__ import annotations

import dataclasses
import enum
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np

from keras_het.asynchronous.parameter_service.client import Channel, ServiceLostError, result_of
from keras_het.exchange.message import Kind, Message, Status, Vector

LARGEST_EPOCH = 1 << 16
LEADER = 0
"""Number of the sync group, or of the task that leads a service, among the participants."""
LEDGER_KINDS = (Kind.CLAIM, Kind.REPORT, Kind.PACE, Kind.LEAD)
PACE_NUMBERS = 5
NO_CHANGE = -1
"""The leader's stage in a request that only counts samples and asks for an overview."""


class Stage(enum.IntEnum):
    """The stage of training."""

    STARTING = 0
    RUNNING = 1
    ENDING = 2
    CLOSED = 3


class Presence(enum.IntEnum):
    """An async worker's activity."""

    GONE = 0
    WAITING = 1
    TRAINING = 2


class TrainingFacts(NamedTuple):
    """The facts about the sync group's training that async workers need."""

    num_batches: int = 0
    fingerprint: int = 0
    first_pass: int = 0
    run: int = 0
    num_epochs: int = LARGEST_EPOCH
    stage: int = Stage.STARTING
    epoch: int = 0


class SampleLedger:
    """Ledger that hands out each global batch of an epoch once and counts the samples used."""

    # A participant is never more than one epoch ahead of the sync group. A batch held by a killed
    # one is not handed out again: `claimed` minus `used` shows the loss.

    def __init__(self, num_participants: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._participants = [_Participant() for _ in range(num_participants)]
        self._facts = TrainingFacts()
        self._next: dict[int, int] = {}  # the first batch of each epoch that nobody has
        self._lock = threading.Lock()

    def handle(self, sender: int, request: Message) -> Message:
        """Answer a message of a participant; one that cannot be is an error without effect."""
        if not 0 <= sender < len(self._participants):
            raise PermissionError(
                f"There is no such participant. Received: {sender}; expected: one of "
                f"{len(self._participants)}, from 0."
            )
        own = self._participants[sender]
        with self._lock:
            match request.kind:
                case Kind.CLAIM:
                    return self._claim(own, *request.numbers)
                case Kind.REPORT:
                    return self._report(own, *request.numbers)
                case Kind.PACE:
                    return self._pace(own, request.vectors[0])
                case Kind.LEAD if sender == LEADER:
                    number, samples = request.numbers
                    return self._lead(own, number, samples, request.vectors[0])
                case Kind.LEAD:
                    raise PermissionError(f"Only the leader may do that. Received: {sender}.")
        raise ValueError(f"The ledger does not answer {request.kind.name}.")

    def _claim(self, own: _Participant, epoch: int, count: int) -> Message:
        _check(0 <= epoch < LARGEST_EPOCH and count > 0, "claim", (epoch, count))
        facts = self._facts
        if facts.stage != Stage.RUNNING or epoch > facts.epoch + 1:
            return Message(Kind.GRANT, (Status.WAIT, 0, 0))
        first = self._next.get(epoch, 0)
        left = facts.num_batches - first if epoch < facts.num_epochs else 0
        granted = max(0, min(left, count))
        self._next[epoch] = first + granted
        own.claimed += granted
        return Message(Kind.GRANT, (Status.OK, first, granted))

    def _report(self, own: _Participant, number: int, samples: int, presence: int) -> Message:
        is_right = min(number, samples) >= 0 and 0 <= presence <= max(Presence)
        _check(is_right, "report", (number, samples, presence))
        own.count(number, samples)
        own.presence, own.reported_at = Presence(presence), self._clock()
        return Message(Kind.FACTS, (), (np.array([*self._facts, own.counted], np.int64),))

    def _pace(self, own: _Participant, pace: Vector) -> Message:
        is_right = len(pace) == PACE_NUMBERS and bool(np.isfinite(pace).all())
        is_right = is_right and pace[0] > 0 and pace[1] >= 1 and min(pace[2:]) >= 0
        _check(is_right, "pace", pace)
        own.pace, own.paced_at = tuple(pace.tolist()), self._clock()
        everyone, now = self._participants, self._clock()
        paces = np.array([each.pace for each in everyone], np.float64).ravel()
        silence = [now - max(each.paced_at, each.reported_at) for each in everyone]
        return Message(Kind.PACES, (), (paces, np.array(silence, np.float64)))

    def _lead(self, own: _Participant, number: int, samples: int, numbers: Vector) -> Message:
        """Set the facts, unless there is no change, and return the participants' activities."""
        received = number, samples, *numbers.tolist()
        _check(len(numbers) == len(TrainingFacts._fields) + 1, "facts", received)
        *given, taken_until = numbers.tolist()
        facts = TrainingFacts(*given)
        counts = number, samples, taken_until, *facts._replace(fingerprint=0, stage=0)
        is_right = NO_CHANGE <= facts.stage <= max(Stage) and facts.epoch < LARGEST_EPOCH
        _check(is_right and min(counts) >= 0, "facts", received)
        own.count(number, samples)
        if facts.stage != NO_CHANGE:
            self._next[facts.epoch] = max(self._next.get(facts.epoch, 0), taken_until)
            self._facts = facts
        return Message(Kind.OVERVIEW, (), (self._overview(),))

    def _overview(self) -> Vector:
        """Per participant: presence, silence in seconds, batches, samples, batches left, report."""
        facts, now = self._facts, self._clock()
        left = facts.num_batches - self._next.get(facts.epoch, 0)
        rows = [
            (each.presence, now - each.reported_at, each.claimed, each.used, left, each.counted)
            for each in self._participants
        ]
        return np.array(rows, np.float64).ravel()


@dataclasses.dataclass
class _Participant:
    """What the ledger knows of one participant."""

    presence: Presence = Presence.GONE
    claimed: int = 0
    used: int = 0
    counted: int = 0  # number of the latest report
    pace: tuple[float, ...] = (0.0,) * PACE_NUMBERS
    reported_at: float = -math.inf
    paced_at: float = -math.inf

    def count(self, number: int, samples: int) -> None:
        """Count samples unless their report has been counted."""
        if not number or number > self.counted:
            self.used += samples
        self.counted = max(self.counted, number)


def _check(is_right: bool, what: str, received: object) -> None:
    if not is_right:
        raise ValueError(f"The ledger knows no such {what}. Received: {received}.")


_OVERVIEW_NUMBERS = 6
_ROOM_FOR_STRAGGLERS = 1 << 20


class LedgerConnection:
    """One participant's connection to a `SampleLedger`; the channel knows which one it is."""

    # A report without an answer is repeated unchanged before the next. Some of an earlier process
    # of this worker may be in flight: numbers begin well above the last one that is known.

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._waiting = 0  # samples in no report yet
        self._open: tuple[int, int] | None = None  # a report without an answer
        self._latest_report: int | None = None
        self._early: tuple[int, Future[Message]] | None = None  # epoch and answer
        self._is_of_lost_service = False

    def ask_ahead(self, epoch: int) -> None:
        """Ask for a batch early: a late request would queue behind weights on the link."""
        if self._early is None:
            self._early = epoch, self.start_claim(epoch)

    def service_lost(self) -> None:
        """Record that the answer to a pending question may never arrive."""
        self._is_of_lost_service = self._early is not None

    def take(self, epoch: int, after: int) -> tuple[Status, int, int]:
        """Claim a batch, or take the one that was asked for ahead, unless it is used already."""
        early, self._early = self._early, None
        is_doubtful, self._is_of_lost_service = self._is_of_lost_service, False
        if early is not None and early[0] == epoch:
            try:
                status, first, granted = self.answer_to(early[1])
                if status == Status.OK and (not granted or first > after):
                    return status, first, granted
            except ServiceLostError:
                if not is_doubtful:
                    raise
        return self.claim(epoch)

    def claim(self, epoch: int, count: int = 1) -> tuple[Status, int, int]:
        return self.answer_to(self.start_claim(epoch, count))

    def start_claim(self, epoch: int, count: int = 1) -> Future[Message]:
        return self._channel.start(Message(Kind.CLAIM, (epoch, count)))

    def answer_to(self, claim: Future[Message]) -> tuple[Status, int, int]:
        status, first, granted = result_of(claim, self._channel).numbers
        return Status(status), first, granted

    def report(self, presence: Presence, used: int = 0) -> TrainingFacts:
        self.add_used(used)
        facts = self._report(presence)
        while self._has_samples:
            facts = self._report(presence)
        return facts

    def add_used(self, samples: int) -> None:
        self._waiting += samples

    def _report(self, presence: Presence) -> TrainingFacts:
        (facts,) = self._ask(Message(Kind.REPORT, (*self._next_report(), presence)))
        *given, latest = facts.tolist()
        self._note_answer(latest)
        return TrainingFacts(*given)

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

    def _ask(self, request: Message) -> tuple[Vector, ...]:
        return self._channel.ask(request).vectors


class LeaderLedger(LedgerConnection):
    """The leader's side: it also tells the facts of training, and hears of all participants."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel)
        self.facts = TrainingFacts()
        self.is_kept = False
        """Whether to give the last answer, as the other process may be gone."""
        self._latest = np.zeros([0, _OVERVIEW_NUMBERS])

    def tell(self, taken_until: int = 0) -> None:
        self._lead(self.facts.stage, taken_until)

    @property
    def is_handed_out(self) -> bool:
        """Whether all batches of the present epoch are."""
        return bool(self._lead()[0, 4] <= 0)

    def tell_used(self) -> None:
        """Report all stored samples to the ledger, which counts each once."""
        while self._has_samples and not self.is_kept:
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

    def _lead(self, stage: int = NO_CHANGE, taken_until: int = 0) -> np.ndarray:
        if not self.is_kept:
            numbers = np.array([*self.facts._replace(stage=stage), taken_until], np.int64)
            (overview,) = self._ask(Message(Kind.LEAD, self._next_report(), (numbers,)))
            self._latest = overview.reshape(-1, _OVERVIEW_NUMBERS)
            self._note_answer(int(self._latest[0, 5]))
        return self._latest
