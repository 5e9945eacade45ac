"""Assign global batches of an epoch to participants, and count the samples used."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_het.rpc.admission import Status
from keras_het.rpc.function_server import FunctionServer
from keras_het.rpc.gate import Gate
from keras_het.rpc.served_function import TfFunction, answer_if

LARGEST_EPOCH = 1 << 16
LEADER = 0
"""Number of the sync group, or of the task that leads a service, among the participants."""
PREFIX = "ledger_"
PACE_NUMBERS = 6
_ONE, _NUMBER = tf.TensorSpec([], tf.int32), tf.TensorSpec([], tf.int64)
_REPORT = tf.TensorSpec([2], tf.int64)


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

    Participants take batches at their own pace: faster ones take more, and none waits. An epoch is
    over when all its batches have been handed out. A participant may begin the next epoch at once,
    but is never more than one epoch ahead of the sync group. A batch held by a killed one is not
    handed out again: `claimed` minus `used` shows the loss. A report of samples carries a number: a
    report whose answer was lost can be sent again and counts once.
    """

    def __init__(self, server: FunctionServer, gate: Gate, num_participants: int) -> None:
        self._num_participants = num_participants
        with tf.init_scope(), tf.device("CPU:0"):
            self._next = _variable(tf.zeros([LARGEST_EPOCH], tf.int64))
            self._total = _variable(tf.zeros([], tf.int64))
            self._epoch = _variable(tf.zeros([], tf.int64))
            self._stage = _variable(tf.zeros([], tf.int32))
            self._fingerprint = _variable(tf.zeros([], tf.int64))
            self._first_pass = _variable(tf.zeros([], tf.int64))
            self._run = _variable(tf.zeros([], tf.int64))
            self._num_epochs = _variable(tf.constant(LARGEST_EPOCH, tf.int64))
            self._claimed = _variable(tf.zeros([num_participants], tf.int64))
            self._used = _variable(tf.zeros([num_participants], tf.int64))
            self._counted = _variable(tf.zeros([num_participants], tf.int64))
            self._last_seen = _variable(tf.zeros([num_participants], tf.float64))
            self._presence = _variable(tf.zeros([num_participants], tf.int32))
            self._paces = _variable(tf.zeros([num_participants, PACE_NUMBERS], tf.float64))
            self._paced = _variable(tf.zeros([num_participants], tf.float64))
            self._lock = tf.CriticalSection(shared_name="keras_het_ledger")
        claim, pace = [_ONE, _NUMBER, _NUMBER], [_ONE, tf.TensorSpec([PACE_NUMBERS], tf.float64)]
        report, lead = [_ONE, _REPORT, _ONE], [_ONE, _REPORT, tf.TensorSpec([8], tf.int64)]
        self._claim, self._pace = _graph(self._take, claim), _graph(self._note_pace, pace)
        server.register(f"{PREFIX}claim", _graph(self._served_claim, claim), gate)
        server.register(f"{PREFIX}report", _graph(self._served_report, report), gate, self._refused)
        server.register(f"{PREFIX}lead", _graph(self._served_lead, lead), gate)
        server.register(f"{PREFIX}pace", _graph(self._served_pace, pace), gate)

    def start_epoch(self, epoch: int, training: TrainingFacts) -> None:
        """Begin an epoch of the sync group."""
        for place, number in zip(self._facts(), training, strict=True):
            place.assign(number)
        self._epoch.assign(epoch)

    def set_stage(self, stage: Stage) -> None:
        """Announce the stage of training to all participants."""
        self._stage.assign(int(stage))

    def claim(self, participant: int, epoch: int, count: int) -> tuple[int, int]:
        """Claim the next batches of an epoch, in this process."""
        first, granted = self._claim(
            tf.constant(participant), tf.constant(epoch, tf.int64), tf.constant(count, tf.int64)
        )
        return int(first), int(granted)

    def pace(self, participant: int, pace: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
        """Record a participant's pace and return the pace of all participants."""
        paces, silence = self._pace(tf.constant(participant), tf.constant(pace, tf.float64))
        return paces.numpy(), silence.numpy()

    @property
    def stage(self) -> Stage:
        """The stage of training."""
        return Stage(int(self._stage))

    def is_handed_out(self, epoch: int) -> bool:
        """Whether all batches of an epoch have been handed out."""
        return int(tf.gather(self._next, epoch)) >= int(self._total)

    def add_used(self, participant: int, samples: int) -> None:
        """Count samples that a participant has used."""
        self._used.scatter_nd_add([[participant]], [samples])

    @property
    def claimed(self) -> np.ndarray:
        """Global batches handed out to each participant, int64 of shape [num_participants]."""
        return self._claimed.numpy()

    @property
    def used(self) -> np.ndarray:
        """Samples that each participant has used, int64 of shape [num_participants]."""
        return self._used.numpy()

    def tell(self, taken_until: int = 0) -> None:
        """Do nothing: the ledger is here, and so is what was handed out."""

    def tell_used(self) -> None:
        """Do nothing: samples are counted at once."""

    def keep(self) -> None:
        """Do nothing: counts stay readable in any case."""

    def present(self, presence: Presence, within_seconds: float) -> list[int]:
        """Return participants heard from recently."""
        recent = self._last_seen.numpy() > float(tf.timestamp()) - within_seconds
        chosen = np.flatnonzero(recent & (self._presence.numpy() == int(presence)))
        return [int(participant) for participant in chosen]

    def _take(
        self, participant: tf.Tensor, epoch: tf.Tensor, count: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Hand out batches; in the graph."""

        def take() -> Any:
            first = tf.gather(self._next, epoch)  # avoids a copy of the whole variable
            left = tf.where(epoch < self._num_epochs, self._total - first, 0)
            granted = tf.clip_by_value(left, 0, count)
            taken = self._next.scatter_nd_update([[epoch]], [first + granted])
            counted = self._claimed.scatter_nd_add([[participant]], [granted])
            with tf.control_dependencies([taken, counted]):
                return tf.identity(first), tf.identity(granted)

        return self._lock.execute(take)

    def _served_claim(
        self, participant: tf.Tensor, epoch: tf.Tensor, count: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        known = self._is_known(participant) & (count > 0) & (epoch >= 0) & (epoch < LARGEST_EPOCH)
        running = tf.equal(self._stage, int(Stage.RUNNING)) & (epoch <= self._epoch + 1)

        def take() -> Any:
            return _status(Status.OK), *self._claim(participant, epoch, count)

        return answer_if(
            known, lambda: answer_if(running, take, Status.WAIT), Status.UNKNOWN_CLIENT
        )

    def _served_report(
        self, participant: tf.Tensor, used: tf.Tensor, presence: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        known = self._is_known(participant) & tf.reduce_all(used >= 0)
        known &= (presence >= 0) & (presence <= max(Presence))

        def note() -> tf.Tensor:
            place = [[participant]]
            notes = [
                self._lock.execute(lambda: self._count(participant, used)),
                self._last_seen.scatter_nd_update(place, [tf.timestamp()]),
                self._presence.scatter_nd_update(place, [presence]),
            ]
            with tf.control_dependencies(notes):
                return _status(Status.OK)

        code = tf.cond(known, note, lambda: _status(Status.UNKNOWN_CLIENT))
        with tf.control_dependencies([code]):
            admitted = tf.equal(code, int(Status.OK))
            numbers = [self._epoch.read_value(), *(f.read_value() for f in self._facts())]
            latest = self._counted[tf.where(admitted, participant, 0)]
            facts = tf.stack([tf.cast(self._stage, tf.int64), *numbers, latest])
            return code, tf.where(admitted, facts, tf.fill([8], tf.constant(-1, tf.int64)))

    def _refused(self) -> tf.Tensor:
        """Refuse a worker of the next training, which may ask before this one is gone."""
        closed = tf.equal(self._stage, int(Stage.CLOSED))
        return tf.where(closed, int(Status.CLOSED), int(Status.REFUSED))

    def _note_pace(self, participant: tf.Tensor, pace: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Record a pace and return all; in the graph."""
        noted = [
            self._paces.scatter_nd_update([[participant]], [pace]),
            self._paced.scatter_nd_update([[participant]], [tf.timestamp()]),
        ]
        with tf.control_dependencies(noted):
            latest = tf.maximum(self._paced.read_value(), self._last_seen.read_value())
            return self._paces.read_value(), tf.timestamp() - latest

    def _served_pace(
        self, participant: tf.Tensor, pace: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        known = self._is_known(participant) & tf.reduce_all(tf.math.is_finite(pace)) & (pace[0] > 0)
        known &= (pace[1] >= 1) & tf.reduce_all(pace[2:] >= 0)
        return answer_if(
            known,
            lambda: (_status(Status.OK), *self._pace(participant, pace)),
            Status.UNKNOWN_CLIENT,
        )

    def _served_lead(
        self, participant: tf.Tensor, used: tf.Tensor, facts: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Set the facts, unless the stage is negative, and return the participants' activities."""
        stage, taken_until, epoch, *numbers = tf.unstack(facts)

        def count_and_pass_on() -> tf.Tensor:
            counted = self._count(participant, used)
            until = tf.where(stage >= 0, taken_until, 0)
            following = tf.maximum(tf.gather(self._next, epoch), until)
            passed_on = self._next.scatter_nd_update([[epoch]], [following])
            with tf.control_dependencies([counted, passed_on]):
                return tf.identity(following)

        def note() -> tf.Tensor:
            places = (self._epoch, *self._facts())
            for place, number in zip(places, (epoch, *numbers), strict=True):
                place.assign(number)
            self._stage.assign(tf.cast(stage, tf.int32))
            return _status(Status.OK)

        def take() -> Any:
            passed_on = self._lock.execute(count_and_pass_on)
            with tf.control_dependencies([passed_on]):  # before others may claim
                noted = tf.cond(stage >= 0, note, lambda: _status(Status.OK))
            with tf.control_dependencies([noted]):
                return _status(Status.OK), self._overview()

        known = tf.equal(participant, 0) & tf.reduce_all(used >= 0) & (stage <= int(Stage.CLOSED))
        known &= (epoch >= 0) & (epoch < LARGEST_EPOCH)
        return answer_if(known, take)

    def _is_known(self, participant: tf.Tensor) -> tf.Tensor:
        return (participant >= 0) & (participant < self._num_participants)

    def _count(self, participant: tf.Tensor, used: tf.Tensor) -> tf.Tensor:
        """Count samples unless their report has been counted; in the graph, under the lock."""
        number, samples = tf.unstack(used)

        is_new = tf.equal(number, 0) | (number > self._counted[participant])
        latest = tf.maximum(number, self._counted[participant])
        added = self._used.scatter_nd_add([[participant]], [tf.where(is_new, samples, 0)])
        with tf.control_dependencies([added]):
            return self._counted.scatter_nd_update([[participant]], [latest])[participant]

    def _facts(self) -> tuple[tf.Variable, ...]:
        """Return the variables of `TrainingFacts`, in its order."""
        return (self._total, self._fingerprint, self._first_pass, self._run, self._num_epochs)

    def _overview(self) -> tf.Tensor:
        """Per participant: presence, silence in seconds, batches, samples, batches left, report."""
        left = self._total - tf.gather(self._next, self._epoch)
        columns = (
            self._presence.read_value(),
            tf.timestamp() - self._last_seen,
            self._claimed.read_value(),
            self._used.read_value(),
            tf.fill([self._num_participants], left),
            self._counted.read_value(),
        )
        return tf.stack([tf.cast(column, tf.float64) for column in columns], axis=1)


def _variable(value: tf.Tensor) -> tf.Variable:
    return tf.Variable(value, trainable=False)


def _graph(function: Callable[..., Any], signature: list[tf.TensorSpec]) -> TfFunction:
    return tf.function(function, input_signature=signature, autograph=False)


def _status(status: Status) -> tf.Tensor:
    return tf.constant(int(status))
