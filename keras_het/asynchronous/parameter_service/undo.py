"""Updates of a partition, undone if they would make it not finite."""

from __future__ import annotations

from collections.abc import Collection
from typing import cast

import tensorflow as tf

from keras_het.asynchronous.parameter_service.part import Part
from keras_het.asynchronous.rules import PushMeta, UpdateRule
from keras_het.rpc.admission import Status

Taken = tuple[tf.Tensor, tf.Tensor | tf.Variable, tf.Tensor]
"""Status of a push, new version, and the rule's answer."""
LARGEST_NORM = 1e15
"""Below this norm the sum of a partition is finite for any number of elements."""


class Change:
    """A worker's change of a partition, and its norm; in the graph."""

    def __init__(self, values: tf.Tensor) -> None:
        self.values = values
        self.norm = _norm(values)

    def is_finite(self) -> tf.Tensor:
        """Whether all values are finite, bool scalar; only very large ones need a second pass."""
        finite = tf.math.is_finite(self.norm)
        return tf.cond(finite, lambda: tf.constant(True), lambda: is_finite(self.values))


def apply_rule(rule: UpdateRule, part: Part, change: Change, meta: PushMeta) -> Taken:
    """Apply a rule, unless finite messages would add up to a non-finite result; in the graph."""
    if rule.norm_after(0.0, 0.0) is None:
        return _apply_or_undo(rule, part, change.values, meta)
    # Decide by the known bound of the center's norm; inspect the result only if that says nothing.
    at_most = cast(tf.Tensor, rule.norm_after(part.largest_norm.read_value(), change.norm))
    at_most = tf.cond(
        at_most < LARGEST_NORM,  # false for NaN, too
        lambda: at_most,
        lambda: rule.norm_after(_norm(part.center.read_value()), change.norm),
    )

    def take() -> Taken:
        with tf.control_dependencies([part.largest_norm.assign(at_most, read_value=True)]):
            answer = rule.update(part.center, part.slots, change.values, meta)
        return _taken(part, answer)

    def take_or_undo() -> Taken:
        unknown = part.largest_norm.assign(float("inf"), read_value=True)
        with tf.control_dependencies([unknown]):
            return _apply_or_undo(rule, part, change.values, meta)

    # An undo needs the old center, so the update then makes a new one instead of changing it.
    result: Taken = tf.cond(at_most < LARGEST_NORM, take, take_or_undo)
    return result


def _apply_or_undo(rule: UpdateRule, part: Part, change: tf.Tensor, meta: PushMeta) -> Taken:
    before = Undo(part, meta.worker, rule.rows_of_workers)
    answer = rule.update(part.center, part.slots, change, meta)

    def leave() -> Taken:
        before.undo()
        if rule.may_wait:  # the push was in its turn
            rule.pass_turn(part.slots, meta)
        center = part.center.read_value()
        return tf.constant(int(Status.NOT_FINITE)), part.version.read_value(), center

    with tf.control_dependencies([answer]):
        result: Taken = tf.cond(before.is_needed(), leave, lambda: _taken(part, answer))
    return result


def _taken(part: Part, answer: tf.Tensor) -> Taken:
    with tf.control_dependencies([answer]):
        new_version = part.version.assign_add(1, read_value=True)
    return tf.constant(int(Status.OK)), new_version, tf.identity(answer)


class Undo:
    """Snapshot of a partition before an update; in the graph, under the partition's lock.

    Finite messages can add up to a center that is not finite, or to a state of the rule (a
    momentum, mean squares) that makes it so later. Without a lock, as with rules that are not
    atomic, concurrent pushes of others may be undone too.
    """

    def __init__(self, part: Part, row: tf.Tensor, rows_of_workers: Collection[str]) -> None:
        self._center, self._slots = part.center, part.slots
        self._row, self._rows_of_workers = row, rows_of_workers
        self._old_center = part.center.read_value()
        self._old = self._read()

    def is_needed(self) -> tf.Tensor:
        """Whether the center is not finite, or the rule's state no longer is; bool scalar."""
        now = {n: value for n, value in self._read().items() if value.dtype.is_floating}
        finite = {name: is_finite(value) for name, value in now.items()}
        is_center_finite = is_finite(self._center.read_value())

        def state_is_as_before() -> tf.Tensor:
            kept = [ok | ~is_finite(self._old[name]) for name, ok in finite.items()]
            return tf.reduce_all([is_center_finite, *kept])

        are_all = tf.reduce_all([is_center_finite, *finite.values()])
        return ~tf.cond(are_all, lambda: tf.constant(True), state_is_as_before)

    def undo(self) -> None:
        """Restore the partition."""
        # Without a lock, the snapshot may hold another push's center that has been undone since.
        was_finite = is_finite(self._old_center)
        self._center.assign(tf.where(was_finite, self._old_center, self._center.read_value()))
        for name, value in self._old.items():
            if name in self._rows_of_workers:
                self._slots[name].scatter_nd_update([[self._row]], value[None])
            else:
                self._slots[name].assign(value)

    def _read(self) -> dict[str, tf.Tensor]:
        found = {}
        for name, slot in sorted(self._slots.items()):
            # Gathered: otherwise all rows would be copied as soon as one of them changes.
            is_row = name in self._rows_of_workers
            found[name] = tf.gather(slot, self._row) if is_row else slot.read_value()
        return found


def _norm(values: tf.Tensor) -> tf.Tensor:
    return tf.sqrt(2 * tf.nn.l2_loss(values))


def is_finite(values: tf.Tensor) -> tf.Tensor:
    """Whether all values are finite, in one pass; a sum beyond float32 is just as useless."""
    return tf.math.is_finite(tf.reduce_sum(values))
