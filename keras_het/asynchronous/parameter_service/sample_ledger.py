"""The ledger that hands out global batches and counts samples."""

from __future__ import annotations

import dataclasses
import enum
import math
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from keras_het.exchange.message import Kind, Message, Vector
from keras_het.exchange.status import Status

LARGEST_EPOCH = 1 << 16
LEADER = 0
"""Number of the sync group, or of the task that leads a service, among the participants."""
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

    num_batches: int
    fingerprint: int = 0
    first_pass: int = 0
    run: int = 0
    num_epochs: int = LARGEST_EPOCH


class SampleLedger:
    """Ledger that hands out each global batch of an epoch once and counts the samples used.

    Participants take batches at their own pace. An epoch is over when all its batches have been
    handed out; a participant is never more than one epoch ahead of the sync group. A batch held by
    a killed one is not handed out again: `claimed` minus `used` shows the loss. A report has a
    number: one whose answer was lost is sent again and counts once.
    """

    def __init__(self, num_participants: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._participants = [_Participant() for _ in range(num_participants)]
        self._stage, self._epoch, self._training = Stage.STARTING, 0, TrainingFacts(0)
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
        if self._stage != Stage.RUNNING or epoch > self._epoch + 1:
            return Message(Kind.GRANT, (Status.WAIT, 0, 0))
        first = self._next.get(epoch, 0)
        left = self._training.num_batches - first if epoch < self._training.num_epochs else 0
        granted = max(0, min(left, count))
        self._next[epoch] = first + granted
        own.claimed += granted
        return Message(Kind.GRANT, (Status.OK, first, granted))

    def _report(self, own: _Participant, number: int, samples: int, presence: int) -> Message:
        is_right = min(number, samples) >= 0 and 0 <= presence <= max(Presence)
        _check(is_right, "report", (number, samples, presence))
        own.count(number, samples)
        own.presence, own.reported_at = Presence(presence), self._clock()
        facts = [self._stage, self._epoch, *self._training, own.counted]
        return Message(Kind.FACTS, (), (np.array(facts, np.int64),))

    def _pace(self, own: _Participant, pace: Vector) -> Message:
        is_right = len(pace) == PACE_NUMBERS and bool(np.isfinite(pace).all())
        is_right = is_right and pace[0] > 0 and pace[1] >= 1 and min(pace[2:]) >= 0
        _check(is_right, "pace", pace)
        own.pace, own.paced_at = tuple(pace.tolist()), self._clock()
        everyone, now = self._participants, self._clock()
        paces = np.array([each.pace for each in everyone], np.float64).ravel()
        silence = [now - max(each.paced_at, each.reported_at) for each in everyone]
        return Message(Kind.PACES, (), (paces, np.array(silence, np.float64)))

    def _lead(self, own: _Participant, number: int, samples: int, facts: Vector) -> Message:
        """Set the facts, unless there is no change, and return the participants' activities."""
        _check(len(facts) == 3 + len(TrainingFacts._fields), "facts", facts)
        stage, taken_until, epoch, *numbers = facts.tolist()
        training = TrainingFacts(*numbers)
        counts = number, samples, taken_until, *training._replace(fingerprint=0)
        is_right = NO_CHANGE <= stage <= max(Stage) and 0 <= epoch < LARGEST_EPOCH
        _check(is_right and min(counts) >= 0, "facts", (number, samples, *facts.tolist()))
        own.count(number, samples)
        if stage != NO_CHANGE:
            self._next[epoch] = max(self._next.get(epoch, 0), taken_until)
            self._stage, self._epoch, self._training = Stage(stage), epoch, training
        return Message(Kind.OVERVIEW, (), (self._overview(),))

    def _overview(self) -> Vector:
        """Per participant: presence, silence in seconds, batches, samples, batches left, report."""
        now, left = self._clock(), self._training.num_batches - self._next.get(self._epoch, 0)
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
