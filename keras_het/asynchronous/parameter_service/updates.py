"""Outcome of a push: accepted by the rule, or rejected with a reason."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from keras_het.asynchronous.parameter_service.part import Part
from keras_het.asynchronous.parameter_service.undo import Change, Taken, apply_rule
from keras_het.asynchronous.rules import PushMeta, UpdateRule
from keras_het.rpc.admission import Status


class Updates:
    """Application of a rule to partitions: each push once, in its turn, and not if too stale."""

    def __init__(self, rule: UpdateRule, staleness_bound: int | None) -> None:
        self._rule = rule
        self._staleness_bound = staleness_bound

    def take(
        self,
        part: Part,
        client: tf.Tensor,
        samples: tf.Tensor,
        version: tf.Tensor,
        change: Change,
        sequence: tf.Tensor | None = None,
    ) -> Taken:
        """Apply the rule if the push is acceptable; return status, new version, rule's answer."""

        def update() -> Taken:
            staleness = tf.cast(tf.maximum(part.version - version, 0), tf.float32)
            meta = PushMeta(client, samples, staleness, part.version.read_value())
            if not self._rule.may_wait:
                return apply_rule(self._rule, part, change, meta)
            return tf.cond(
                self.is_turn(part, meta),
                lambda: apply_rule(self._rule, part, change, meta),
                lambda: nothing(int(Status.WAIT)),
            )

        def checked() -> Taken:
            if sequence is None:
                return update()
            return self._unless_known(part, client, version, sequence, update)

        result: Taken
        if self._rule.is_atomic:
            result = part.lock.execute(checked)
            return result
        # Counted before checking whether training is over: closing waits for this push.
        with tf.control_dependencies([part.under_way.assign_add(1, read_value=True)]):
            result = checked()
        with tf.control_dependencies(list(result)):
            part.under_way.assign_sub(1)
        return result

    def _unless_known(
        self,
        part: Part,
        client: tf.Tensor,
        version: tf.Tensor,
        sequence: tf.Tensor,
        update: Callable[[], Taken],
    ) -> Taken:
        """Take a push unless it was already taken (its answer was lost) or comes too late."""
        numbered = sequence > 0
        repeated = numbered & (sequence <= part.sequences[client])
        stale = self.is_stale(part, version)
        closed = part.is_closed.read_value()

        def take() -> Taken:
            status, new_version, answer = update()
            taken = numbered & tf.equal(status, int(Status.OK))
            latest = tf.where(taken, sequence, part.sequences[client])
            with tf.control_dependencies([part.sequences.scatter_nd_update([[client]], [latest])]):
                return tf.identity(status), new_version, answer

        def leave() -> Taken:
            status = tf.where(closed, int(Status.CLOSED), int(Status.STALE))
            status = tf.where(repeated, int(Status.REPEATED), status)
            return status, part.version.read_value(), part.center.read_value()

        result: Taken = tf.cond(repeated | stale | closed, leave, take)
        return result

    def is_turn(self, part: Part, meta: PushMeta) -> tf.Tensor:
        """Whether a worker may push, for a rule whose workers wait for each other; bool scalar."""
        with tf.control_dependencies([self._rule.note_presence(part.slots, meta.worker)]):
            return self._rule.is_turn(part.slots, meta)

    def is_stale(self, part: Part, version: tf.Tensor) -> tf.Tensor:
        """Whether a worker saw the center too long ago, or another service's; bool scalar."""
        bound = self._staleness_bound
        if bound is None:
            return tf.constant(False)
        # A version that lies in the future belongs to another service with another center.
        return (part.version - version > bound) | (version > part.version)

    def pass_turn(
        self,
        part: Part,
        is_in_turn: tf.Tensor,
        client: tf.Tensor,
        samples: tf.Tensor,
        sequence: tf.Tensor,
    ) -> tf.Tensor:
        """End the turn of a worker whose push is refused, once: the others would wait for it."""
        if not self._rule.may_wait:
            return tf.constant(True)
        meta = PushMeta(client, samples, tf.constant(0.0), part.version.read_value())

        def take_note() -> tf.Tensor:
            latest = tf.maximum(sequence, part.sequences[client])
            noted = part.sequences.scatter_nd_update([[client]], [latest])
            with tf.control_dependencies([noted]):
                return _done(self._rule.pass_turn(part.slots, meta))

        def end_turn() -> tf.Tensor:
            is_new = (sequence < 1) | (sequence > part.sequences[client])
            is_turn = self._rule.is_turn(part.slots, meta)
            return tf.cond(is_new & is_turn, take_note, _no_turn)

        return tf.cond(is_in_turn, lambda: part.lock.execute(end_turn), _no_turn)


def nothing(status: tf.Tensor) -> Taken:
    """Return an answer without version and values."""
    return tf.identity(status), tf.constant(-1, tf.int64), tf.zeros([0])


def _no_turn() -> tf.Tensor:
    return tf.constant(True)


def _done(result: tf.Tensor | tf.Variable) -> tf.Tensor:
    with tf.control_dependencies([result]):
        return tf.constant(True)
