"""The ledger that hands out global batches and counts samples, and a participant's side of it."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_het.rpc.admission import Gate, Status
from keras_het.rpc.channel import Call, Channel, NoAnswerError
from keras_het.rpc.server import FunctionServer, TfFunction, answer_if

LARGEST_EPOCH = 1 << 16
LEADER = 0
"""Number of the sync group, or of the task that leads a service, among the participants."""
PREFIX = "ledger_"
PACE_NUMBERS = 6
_ONE, _NUMBER = tf.TensorSpec([], tf.int32), tf.TensorSpec([], tf.int64)
_REPORT = tf.TensorSpec([2], tf.int64)
_NO_CHANGE = -1
_ROOM_FOR_STRAGGLERS = 1 << 20
_STAGE, _EPOCH, _TOTAL, _NUM_EPOCHS = 0, 1, 2, 6


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
            # The stage, the epoch of the sync group, and `TrainingFacts`.
            facts = [int(Stage.STARTING), 0, *TrainingFacts(0)]
            self._facts = _variable(tf.constant(facts, tf.int64))
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
        server.register(f"{PREFIX}claim", _graph(self._served_claim, claim), gate)
        server.register(f"{PREFIX}report", _graph(self._served_report, report), gate, self._refused)
        server.register(f"{PREFIX}lead", _graph(self._served_lead, lead), gate)
        server.register(f"{PREFIX}pace", _graph(self._served_pace, pace), gate)

    def _served_claim(
        self, participant: tf.Tensor, epoch: tf.Tensor, count: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        known = self._is_known(participant) & (count > 0) & (epoch >= 0) & (epoch < LARGEST_EPOCH)
        running = tf.equal(self._facts[_STAGE], int(Stage.RUNNING))
        running &= epoch <= self._facts[_EPOCH] + 1

        def hand_out() -> Any:
            first = tf.gather(self._next, epoch)  # avoids a copy of the whole variable
            left = tf.where(epoch < self._facts[_NUM_EPOCHS], self._facts[_TOTAL] - first, 0)
            granted = tf.clip_by_value(left, 0, count)
            taken = self._next.scatter_nd_update([[epoch]], [first + granted])
            counted = self._claimed.scatter_nd_add([[participant]], [granted])
            with tf.control_dependencies([taken, counted]):
                return tf.identity(first), tf.identity(granted)

        def take() -> Any:
            return _status(Status.OK), *self._lock.execute(hand_out)

        return answer_if(
            known, lambda: answer_if(running, take, Status.WAIT), Status.UNKNOWN_CLIENT
        )

    def _served_report(
        self, participant: tf.Tensor, used: tf.Tensor, presence: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        known = self._is_known(participant) & tf.reduce_all(used >= 0)
        known &= (presence >= 0) & (presence <= max(Presence))

        def note() -> Any:
            place = [[participant]]
            counted = self._lock.execute(lambda: self._count(participant, used))
            notes = [
                counted,
                self._last_seen.scatter_nd_update(place, [tf.timestamp()]),
                self._presence.scatter_nd_update(place, [presence]),
            ]
            with tf.control_dependencies(notes):
                facts = tf.concat([self._facts.read_value(), counted[None]], axis=0)
                return _status(Status.OK), facts

        return answer_if(known, note, Status.UNKNOWN_CLIENT)

    def _refused(self) -> tf.Tensor:
        """Refuse a worker of the next training, which may ask before this one is gone."""
        closed = tf.equal(self._facts[_STAGE], int(Stage.CLOSED))
        return tf.where(closed, int(Status.CLOSED), int(Status.REFUSED))

    def _served_pace(
        self, participant: tf.Tensor, pace: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        known = self._is_known(participant) & tf.reduce_all(tf.math.is_finite(pace)) & (pace[0] > 0)
        known &= (pace[1] >= 1) & tf.reduce_all(pace[2:] >= 0)

        def note() -> Any:
            noted = [
                self._paces.scatter_nd_update([[participant]], [pace]),
                self._paced.scatter_nd_update([[participant]], [tf.timestamp()]),
            ]
            with tf.control_dependencies(noted):
                latest = tf.maximum(self._paced.read_value(), self._last_seen.read_value())
                silence = tf.timestamp() - latest
                return _status(Status.OK), self._paces.read_value(), silence

        return answer_if(known, note, Status.UNKNOWN_CLIENT)

    def _served_lead(
        self, participant: tf.Tensor, used: tf.Tensor, facts: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Set the facts, unless the stage is negative, and return the participants' activities."""
        stage, taken_until, epoch = tf.unstack(facts[:3])

        def count_and_pass_on() -> tf.Tensor:
            counted = self._count(participant, used)
            until = tf.where(stage >= 0, taken_until, 0)
            following = tf.maximum(tf.gather(self._next, epoch), until)
            passed_on = self._next.scatter_nd_update([[epoch]], [following])
            with tf.control_dependencies([counted, passed_on]):
                return tf.identity(following)

        def note() -> tf.Tensor:
            self._facts.assign(tf.concat([facts[:1], facts[2:]], axis=0))
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

    def _overview(self) -> tf.Tensor:
        """Per participant: presence, silence in seconds, batches, samples, batches left, report."""
        left = self._facts[_TOTAL] - tf.gather(self._next, self._facts[_EPOCH])
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


class ServiceLostError(RuntimeError):
    """The parameter service did not answer in time."""


@dataclasses.dataclass(frozen=True)
class LedgerFacts:
    """The ledger's facts about training."""

    stage: Stage
    epoch: int
    training: TrainingFacts


class LedgerConnection:
    """One participant's connection to a `SampleLedger`."""

    def __init__(self, channel: Channel, participant: int) -> None:
        self._service = channel
        self._participant = tf.constant(participant)
        self._used = UsedSamples()

    def claim(self, epoch: int, count: int = 1) -> tuple[Status, int, int]:
        return self.answer_to(self.start_claim(epoch, count))

    def start_claim(self, epoch: int, count: int = 1) -> Call:
        """Ask like `claim` without waiting: `answer_to` returns the answer."""
        number = tf.TensorSpec([], tf.int64)
        arguments = [tf.constant(epoch, tf.int64), tf.constant(count, tf.int64)]
        specs = (tf.TensorSpec([], tf.int32), number, number)
        return self._service.call(f"{PREFIX}claim", [self._participant, *arguments], specs)

    def answer_to(self, answer: Call) -> tuple[Status, int, int]:
        status, first, granted = self._admitted(lambda: self._service.value(answer))
        return Status(int(status)), int(first), int(granted)

    def report(self, presence: Presence, used: int = 0) -> LedgerFacts:
        self._used.add(used)
        facts = self._report(presence)
        while not self._used.is_empty:
            facts = self._report(presence)
        return facts

    def _report(self, presence: Presence) -> LedgerFacts:
        arguments = [tf.constant(self._used.report(), tf.int64), tf.constant(int(presence))]
        specs = (tf.TensorSpec([], tf.int32), tf.TensorSpec([8], tf.int64))
        status, facts = self.ask("report", arguments, specs)
        if int(status) == Status.CLOSED:
            raise ServiceLostError(
                f"The parameter service at {self._service.address} belongs to a training that has "
                "ended, of another model, update rule, format of messages or secret. Received: "
                "status CLOSED. The next training's service takes its place when its leader "
                "begins."
            )
        stage, epoch, *numbers, latest = (int(fact) for fact in facts)
        self._used.answered(latest)
        return LedgerFacts(Stage(stage), epoch, TrainingFacts(*numbers))

    def pace(self, pace: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
        numbers = tf.TensorSpec(None, tf.float64)
        specs = (tf.TensorSpec([], tf.int32), numbers, numbers)
        _, paces, silence = self.ask("pace", [tf.constant(pace, tf.float64)], specs)
        return paces.numpy(), silence.numpy()

    def ask(self, method: str, arguments: list[tf.Tensor], specs: tuple[tf.TensorSpec, ...]) -> Any:
        name, message = f"{PREFIX}{method}", [self._participant, *arguments]
        return self._admitted(lambda: self._service.ask(name, message, specs))

    def _admitted(self, wait: Callable[[], Any]) -> Any:
        """Wait for an answer, and check that the ledger admits this worker."""
        try:
            values = wait()
        except NoAnswerError as error:
            raise ServiceLostError(
                f"The parameter service at {error} Its process may be gone; give "
                'on_service_loss="continue" to go on without it.'
            ) from error
        if int(values[0]) in (Status.REFUSED, Status.UNKNOWN_CLIENT):
            raise PermissionError(
                f"The parameter service at {self._service.address} refused this worker. Received: "
                f"status {Status(int(values[0])).name}: its secret, model, update rule with its "
                "settings, messages (wire, partition_bytes) or number differs. Use the same "
                "script, TF_CONFIG cluster and secret on every task."
            )
        return values


class LeaderLedger(LedgerConnection):
    """The leader's side: it also tells the facts of training, and hears of all participants."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel, LEADER)
        self._stage, self._epoch = Stage.STARTING, 0
        self._training = TrainingFacts(0)
        self._latest = np.zeros([0, 6])
        self._is_kept = False

    def start_epoch(self, epoch: int, training: TrainingFacts) -> None:
        self._epoch, self._training = epoch, training

    def set_stage(self, stage: Stage) -> None:
        self._stage = stage

    def tell(self, taken_until: int = 0) -> None:
        self._lead(stage=int(self._stage), taken_until=taken_until)

    def is_handed_out(self, epoch: int) -> bool:
        return bool(epoch == self._epoch and self._lead()[0, 4] <= 0)

    def add_used(self, samples: int) -> None:
        self._used.add(samples)

    def tell_used(self) -> None:
        """Report all stored samples to the ledger, which counts each once."""
        while not (self._used.is_empty or self._is_kept):
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

    def _lead(self, stage: int = _NO_CHANGE, taken_until: int = 0) -> np.ndarray:
        if not self._is_kept:
            facts = [stage, taken_until, self._epoch, *self._training]
            specs = (tf.TensorSpec([], tf.int32), tf.TensorSpec([None, 6], tf.float64))
            used = tf.constant(self._used.report(), tf.int64)
            arguments: list[tf.Tensor] = [used, tf.constant(facts, tf.int64)]
            self._latest = self.ask("lead", arguments, specs)[1].numpy()
            self._used.answered(int(self._latest[0, 5]))
        return self._latest


class EarlyClaim:
    """A request for one batch ahead; a late request would queue behind weights on the link."""

    def __init__(self, ledger: LedgerConnection) -> None:
        self._ledger = ledger
        self._epoch = -1
        self._answer: Call | None = None
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


class UsedSamples:
    """Numbered reports; one whose answer was lost is repeated unchanged before the next.

    The ledger returns the last number it knows, possibly from an earlier process of the same
    worker, whose messages may still be in flight: numbers therefore begin some way above it.
    """

    def __init__(self) -> None:
        self._waiting = 0
        self._report: tuple[int, int] | None = None
        self._latest: int | None = None

    def add(self, samples: int) -> None:
        self._waiting += samples

    @property
    def is_empty(self) -> bool:
        return self._report is None and not self._waiting

    def report(self) -> tuple[int, int]:
        """Return number and samples of the next report; zeros if there is nothing to count."""
        if self._report is None and self._waiting and self._latest is not None:
            self._latest += 1
            self._report = self._latest, self._waiting
            self._waiting = 0
        return self._report or (0, 0)

    def answered(self, latest: int) -> None:
        if self._latest is None:
            self._latest = latest + _ROOM_FOR_STRAGGLERS
        self._report = None
