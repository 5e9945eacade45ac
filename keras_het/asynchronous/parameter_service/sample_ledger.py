"""Assign global batches of an epoch to clients, and count the samples used."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_het.rpc.admission import Status
from keras_het.rpc.gate import Gate

LARGEST_EPOCH = 1 << 16
PREFIX = "ledger_"
PACE_NUMBERS = 4


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
    """The facts about the sync group's training that async workers need.

    Attributes:
        num_batches: number of global batches of an epoch.
        fingerprint: fingerprint of the order of the samples, 0 if unknown.
        first_pass: number of epoch 0's pass over the data.
        run: number of the training among those of the leader's process.
        num_epochs: number of epochs of the training; no batch of a later epoch is handed out.
    """

    num_batches: int
    fingerprint: int = 0
    first_pass: int = 0
    run: int = 0
    num_epochs: int = LARGEST_EPOCH


class SampleLedger:
    """Ledger that hands out each global batch of an epoch once and counts the samples used.

    Clients take batches at their own pace: faster clients take more, and none waits. An epoch is
    over when all its batches have been handed out. A client may begin the next epoch at once, but
    is never more than one epoch ahead of the sync group. A batch held by a killed client is not
    handed out again: `claimed` minus `used` shows the loss. A report of samples carries a number: a
    report whose answer was lost can be sent again and counts once.

    Args:
        server: the `FunctionServer` to answer on.
        gate: admits callers.
        num_clients: number of clients; client 0 is the sync group.
    """

    def __init__(self, server: Any, gate: Gate, num_clients: int) -> None:
        self._num_clients = num_clients
        with tf.init_scope(), tf.device("CPU:0"):
            self._next = _variable(tf.zeros([LARGEST_EPOCH], tf.int64))
            self._total = _variable(tf.zeros([], tf.int64))
            self._epoch = _variable(tf.zeros([], tf.int64))
            self._stage = _variable(tf.zeros([], tf.int32))
            self._fingerprint = _variable(tf.zeros([], tf.int64))
            self._first_pass = _variable(tf.zeros([], tf.int64))
            self._run = _variable(tf.zeros([], tf.int64))
            self._num_epochs = _variable(tf.constant(LARGEST_EPOCH, tf.int64))
            self._claimed = _variable(tf.zeros([num_clients], tf.int64))
            self._used = _variable(tf.zeros([num_clients], tf.int64))
            self._counted = _variable(tf.zeros([num_clients], tf.int64))
            self._last_seen = _variable(tf.zeros([num_clients], tf.float64))
            self._presence = _variable(tf.zeros([num_clients], tf.int32))
            self._paces = _variable(tf.zeros([num_clients, PACE_NUMBERS], tf.float64))
            self._paced = _variable(tf.zeros([num_clients], tf.float64))
            self._lock = tf.CriticalSection(shared_name="keras_het_ledger")
        self._claim = self._claim_function()
        self._pace = self._pace_function()
        server.register(f"{PREFIX}claim", self._remote_claim_function(), gate)
        server.register(f"{PREFIX}report", self._report_function(), gate, self._refused)
        server.register(f"{PREFIX}lead", self._lead_function(), gate)
        server.register(f"{PREFIX}pace", self._remote_pace_function(), gate)

    def start_epoch(self, epoch: int, training: TrainingFacts) -> None:
        """Begin an epoch of the sync group.

        Args:
            epoch: number of the epoch, from 0.
            training: the facts about the training.
        """
        for place, number in zip(self._facts(), training, strict=True):
            place.assign(number)
        self._epoch.assign(epoch)

    def set_stage(self, stage: Stage) -> None:
        """Announce the stage of training to all clients."""
        self._stage.assign(int(stage))

    def claim(self, client: int, epoch: int, count: int) -> tuple[int, int]:
        """Claim the next batches of an epoch, in this process.

        Returns:
            The first batch and the number of batches; 0 at the end of the epoch.
        """
        first, granted = self._claim(
            tf.constant(client), tf.constant(epoch, tf.int64), tf.constant(count, tf.int64)
        )
        return int(first), int(granted)

    def pace(self, client: int, pace: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
        """Record a client's pace and return the pace of all clients.

        Args:
            client: the client's number.
            pace: samples per second, samples of a step, least seconds between two pushes, and
                seconds of a pull, 0 if not needed.

        Returns:
            The report of each client, float64 of shape [num_clients, 4], zeros without a report;
            and seconds since each was last heard from, float64 of shape [num_clients].
        """
        paces, silence = self._pace(tf.constant(client), tf.constant(pace, tf.float64))
        return paces.numpy(), silence.numpy()

    @property
    def stage(self) -> Stage:
        """The stage of training."""
        return Stage(int(self._stage))

    def is_handed_out(self, epoch: int) -> bool:
        """Whether all batches of an epoch have been handed out."""
        return int(tf.gather(self._next, epoch)) >= int(self._total)

    def add_used(self, client: int, samples: int) -> None:
        """Count samples that a client has used."""
        self._used.scatter_nd_add([[client]], [samples])

    @property
    def claimed(self) -> np.ndarray:
        """Global batches handed out to each client, int64 of shape [num_clients]."""
        return self._claimed.numpy()

    @property
    def used(self) -> np.ndarray:
        """Samples that each client has used, int64 of shape [num_clients]."""
        return self._used.numpy()

    def present(self, presence: Presence, within_seconds: float) -> list[int]:
        """Return clients heard from recently.

        Args:
            presence: their reported activity.
            within_seconds: longest time since they were heard from.
        """
        recent = self._last_seen.numpy() > float(tf.timestamp()) - within_seconds
        chosen = np.flatnonzero(recent & (self._presence.numpy() == int(presence)))
        return [int(client) for client in chosen]

    def _claim_function(self) -> Any:
        @tf.function(
            input_signature=[
                tf.TensorSpec([], tf.int32),
                tf.TensorSpec([], tf.int64),
                tf.TensorSpec([], tf.int64),
            ],
            autograph=False,
        )
        def claim(client: Any, epoch: Any, count: Any) -> Any:
            def take() -> Any:
                first = tf.gather(self._next, epoch)  # avoids a copy of the whole variable
                left = tf.where(epoch < self._num_epochs, self._total - first, 0)
                granted = tf.clip_by_value(left, 0, count)
                taken = self._next.scatter_nd_update([[epoch]], [first + granted])
                counted = self._claimed.scatter_nd_add([[client]], [granted])
                with tf.control_dependencies([taken, counted]):
                    return tf.identity(first), tf.identity(granted)

            return self._lock.execute(take)

        return claim

    def _remote_claim_function(self) -> Any:
        @tf.function(
            input_signature=[
                tf.TensorSpec([], tf.int32),
                tf.TensorSpec([], tf.int64),
                tf.TensorSpec([], tf.int64),
            ],
            autograph=False,
        )
        def remote_claim(client: Any, epoch: Any, count: Any) -> Any:
            nothing = tf.constant(0, tf.int64)

            def refuse(status: Status) -> Any:
                return tf.constant(int(status)), nothing, nothing

            def take() -> Any:
                first, granted = self._claim(client, epoch, count)
                return tf.constant(int(Status.OK)), first, granted

            known = (client >= 0) & (client < self._num_clients) & (count > 0)
            known &= (epoch >= 0) & (epoch < LARGEST_EPOCH)
            running = tf.equal(self._stage, int(Stage.RUNNING)) & (epoch <= self._epoch + 1)
            return tf.cond(
                known,
                lambda: tf.cond(running, take, lambda: refuse(Status.WAIT)),
                lambda: refuse(Status.UNKNOWN_CLIENT),
            )

        return remote_claim

    def _report_function(self) -> Any:
        @tf.function(
            input_signature=[
                tf.TensorSpec([], tf.int32),
                tf.TensorSpec([2], tf.int64),
                tf.TensorSpec([], tf.int32),
            ],
            autograph=False,
        )
        def report(client: Any, used: Any, presence: Any) -> Any:
            known = (client >= 0) & (client < self._num_clients) & tf.reduce_all(used >= 0)
            known &= (presence >= 0) & (presence <= max(Presence))

            def note() -> Any:
                place = [[client]]
                notes = [
                    self._lock.execute(lambda: self._count(client, used)),
                    self._last_seen.scatter_nd_update(place, [tf.timestamp()]),
                    self._presence.scatter_nd_update(place, [presence]),
                ]
                with tf.control_dependencies(notes):
                    return tf.constant(int(Status.OK))

            code = tf.cond(known, note, lambda: tf.constant(int(Status.UNKNOWN_CLIENT)))
            with tf.control_dependencies([code]):
                admitted = tf.equal(code, int(Status.OK))
                numbers = [self._epoch.read_value(), *(f.read_value() for f in self._facts())]
                latest = self._counted[tf.where(admitted, client, 0)]
                facts = tf.stack([tf.cast(self._stage, tf.int64), *numbers, latest])
                return code, tf.where(admitted, facts, tf.fill([8], tf.constant(-1, tf.int64)))

        return report

    def _refused(self) -> Any:
        """Refuse a worker of the next training, which may ask before this one is gone."""
        closed = tf.equal(self._stage, int(Stage.CLOSED))
        return tf.where(closed, int(Status.CLOSED), int(Status.REFUSED))

    def _pace_function(self) -> Any:
        @tf.function(
            input_signature=[
                tf.TensorSpec([], tf.int32),
                tf.TensorSpec([PACE_NUMBERS], tf.float64),
            ],
            autograph=False,
        )
        def pace(client: Any, pace: Any) -> Any:
            noted = [
                self._paces.scatter_nd_update([[client]], [pace]),
                self._paced.scatter_nd_update([[client]], [tf.timestamp()]),
            ]
            with tf.control_dependencies(noted):
                latest = tf.maximum(self._paced.read_value(), self._last_seen.read_value())
                return self._paces.read_value(), tf.timestamp() - latest

        return pace

    def _remote_pace_function(self) -> Any:
        @tf.function(
            input_signature=[
                tf.TensorSpec([], tf.int32),
                tf.TensorSpec([PACE_NUMBERS], tf.float64),
            ],
            autograph=False,
        )
        def remote_pace(client: Any, pace: Any) -> Any:
            def unknown() -> Any:
                return (
                    tf.constant(int(Status.UNKNOWN_CLIENT)),
                    tf.zeros([self._num_clients, PACE_NUMBERS], tf.float64),
                    tf.zeros([self._num_clients], tf.float64),
                )

            known = (client >= 0) & (client < self._num_clients)
            known &= tf.reduce_all(tf.math.is_finite(pace)) & (pace[0] > 0)
            known &= (pace[1] >= 1) & (pace[2] >= 0) & (pace[3] >= 0)
            return tf.cond(
                known,
                lambda: (tf.constant(int(Status.OK)), *self._pace(client, pace)),
                unknown,
            )

        return remote_pace

    def _lead_function(self) -> Any:
        @tf.function(
            input_signature=[
                tf.TensorSpec([], tf.int32),
                tf.TensorSpec([2], tf.int64),
                tf.TensorSpec([8], tf.int64),
            ],
            autograph=False,
        )
        def lead(client: Any, used: Any, facts: Any) -> Any:
            """Set the facts, unless the stage is negative, and return the clients' activities."""
            stage, taken_until, epoch, *numbers = tf.unstack(facts)

            def count_and_pass_on() -> Any:
                counted = self._count(client, used)
                until = tf.where(stage >= 0, taken_until, 0)
                following = tf.maximum(tf.gather(self._next, epoch), until)
                passed_on = self._next.scatter_nd_update([[epoch]], [following])
                with tf.control_dependencies([counted, passed_on]):
                    return tf.identity(following)

            def note() -> Any:
                places = (self._epoch, *self._facts())
                for place, number in zip(places, (epoch, *numbers), strict=True):
                    place.assign(number)
                self._stage.assign(tf.cast(stage, tf.int32))
                return tf.constant(int(Status.OK))

            def take() -> Any:
                passed_on = self._lock.execute(count_and_pass_on)
                with tf.control_dependencies([passed_on]):  # before others may claim
                    noted = tf.cond(stage >= 0, note, lambda: tf.constant(int(Status.OK)))
                with tf.control_dependencies([noted]):
                    return tf.constant(int(Status.OK)), self._overview()

            known = tf.equal(client, 0) & tf.reduce_all(used >= 0) & (stage <= int(Stage.CLOSED))
            known &= (epoch >= 0) & (epoch < LARGEST_EPOCH)
            return tf.cond(
                known,
                take,
                lambda: (tf.constant(int(Status.REFUSED)), tf.zeros([0, 6], tf.float64)),
            )

        return lead

    def _count(self, client: Any, used: Any) -> Any:
        """Count samples unless their report has been counted; in the graph, under the lock.

        Args:
            client: the client that used them.
            used: number of the report, 0 for none; and number of samples.
        """
        number, samples = tf.unstack(used)

        is_new = tf.equal(number, 0) | (number > self._counted[client])
        latest = tf.maximum(number, self._counted[client])
        added = self._used.scatter_nd_add([[client]], [tf.where(is_new, samples, 0)])
        with tf.control_dependencies([added]):
            return self._counted.scatter_nd_update([[client]], [latest])[client]

    def _facts(self) -> tuple[Any, ...]:
        """Return the variables of `TrainingFacts`, in its order."""
        return (self._total, self._fingerprint, self._first_pass, self._run, self._num_epochs)

    def _overview(self) -> Any:
        """Per client: presence, silence in seconds, batches, samples, batches left, report."""
        left = self._total - tf.gather(self._next, self._epoch)
        columns = (
            self._presence.read_value(),
            tf.timestamp() - self._last_seen,
            self._claimed.read_value(),
            self._used.read_value(),
            tf.fill([self._num_clients], left),
            self._counted.read_value(),
        )
        return tf.stack([tf.cast(column, tf.float64) for column in columns], axis=1)


def _variable(value: Any) -> Any:
    return tf.Variable(value, trainable=False)
