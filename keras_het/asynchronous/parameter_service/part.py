"""One partition of the center: its state, its updates, and the functions that others call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import tensorflow as tf

from keras_het import private_api
from keras_het.asynchronous.rules import PushMeta, UpdateRule
from keras_het.rpc.admission import Status
from keras_het.rpc.server import TfFunction, answer_if
from keras_het.rpc.vector import LARGEST_MESSAGE_BYTES
from keras_het.value_types import Nest

LARGEST_PIECE = LARGEST_MESSAGE_BYTES // 8
"""Number of elements of a piece of a variable in a message, of up to 8 bytes each."""
Taken = tuple[tf.Tensor, tf.Tensor | tf.Variable, tf.Tensor]
"""Status of a push, new version, and the rule's answer."""
LARGEST_NORM = 1e15
"""Below this norm the sum of a partition is finite for any number of elements."""
_NUMBER = tf.TensorSpec([], tf.int32)


class Part:
    """Variables of a partition, in this process."""

    def __init__(
        self, size: int, rule: UpdateRule, num_clients: int, lock: str, has_center: bool = True
    ) -> None:
        self.size = size
        self.sequences = tf.Variable(tf.zeros([num_clients], tf.int64), trainable=False)
        self.center = tf.Variable(tf.zeros([size]), trainable=False)
        self.has_center = tf.Variable(has_center, trainable=False)
        # At least the center's norm; infinite while that is unknown.
        self.largest_norm = tf.Variable(float("inf"), trainable=False)
        self.version = tf.Variable(tf.zeros([], tf.int64), trainable=False)
        self.is_closed = tf.Variable(False, trainable=False)
        # Number of pushes in progress without the lock.
        self.under_way = tf.Variable(tf.zeros([], tf.int64), trainable=False)
        self.slots = rule.create_slots(self.center)
        # All unnamed locks are the same lock.
        self.lock = tf.CriticalSection(shared_name=f"keras_het_{lock}")

    def set_center(self, values: tf.Tensor) -> tf.Tensor | tf.Variable:
        """Set the weights from outside the rule; in the graph or eagerly."""
        with tf.control_dependencies([self.largest_norm.assign(float("inf"), read_value=True)]):
            brought = self.center.assign(values, read_value=True)
        with tf.control_dependencies([brought]):
            return self.has_center.assign(True, read_value=True)

    @property
    def kind(self) -> tuple[Any, ...]:
        """Key that partitions must share for their functions to be traced once for all."""
        slots = sorted(self.slots.items())
        return self.size, *((name, tuple(slot.shape), slot.dtype.name) for name, slot in slots)

    def resources(self) -> list[tf.Tensor]:
        """Handles of the variables and of the lock, in an order that depends only on the kind."""
        own = (self.center, self.version, self.sequences, self.is_closed)
        others = (self.under_way, self.has_center, self.largest_norm)
        slots = (self.slots[name] for name in sorted(self.slots))
        handles = [variable.handle for variable in (*own, *others, *slots)]
        return [*handles, private_api.mutex_of(self.lock)]

    @property
    def state_sizes(self) -> tuple[int, ...]:
        """Number of elements of the version and of each of the rule's variables, by name."""
        return tuple(int(variable.shape.num_elements()) for variable in self._state())

    def export(self, place: tf.Tensor, start: tf.Tensor) -> Nest:
        """Return variable sizes and a serialized piece of one variable; in the graph."""
        sizes = self.state_sizes

        def read(variable: tf.Variable) -> tf.Tensor:
            values = tf.reshape(variable.read_value(), [-1])
            return tf.io.serialize_tensor(values[start : start + LARGEST_PIECE])

        return answer_if(
            (place >= 0) & (place < len(sizes)) & (start >= 0),
            lambda: (
                tf.constant(int(Status.OK)),
                tf.constant(sizes, tf.int64),
                tf.switch_case(place, [functools.partial(read, own) for own in self._state()]),
            ),
        )

    def set_state(
        self, saved_sizes: tf.Tensor, place: tf.Tensor, start: tf.Tensor, piece: tf.Tensor
    ) -> Nest:
        """Accept a piece of a variable of an equally sized partition; in the graph."""
        sizes = self.state_sizes
        fits = tf.cond(
            tf.equal(tf.size(saved_sizes), len(sizes)),
            lambda: tf.reduce_all(tf.equal(saved_sizes, sizes)),
            lambda: tf.constant(False),
        )

        def take() -> tf.Tensor:
            # Two pieces of a variable are in flight at a time.
            taken = self.lock.execute(lambda: self._set_piece(place, start, piece))
            return tf.where(taken, int(Status.OK), int(Status.NOT_FINITE))

        return answer_if((place >= 0) & (place < len(sizes)) & (start >= 0) & fits, take)

    def _set_piece(self, place: tf.Tensor, start: tf.Tensor, piece: tf.Tensor) -> tf.Tensor:
        """Set a piece of a variable under the lock.

        Nothing changes if the piece cannot be read, is not finite, or has a version below 0.
        """

        def write(variable: tf.Variable) -> tf.Tensor:
            values = tf.reshape(variable.read_value(), [-1])
            new = tf.ensure_shape(tf.io.parse_tensor(piece, variable.dtype), [None])
            end = start + tf.size(new, out_type=tf.int64)
            whole = tf.concat([values[:start], new, values[end:]], axis=0)

            def take() -> tf.Tensor:
                variable.assign(tf.reshape(whole, variable.shape))
                return tf.constant(True)

            is_valid = self._is_valid(variable, new, values)
            return tf.cond(is_valid, take, lambda: tf.constant(False))

        return tf.switch_case(place, [functools.partial(write, own) for own in self._state()])

    def _is_valid(self, variable: tf.Variable, values: tf.Tensor, before: tf.Tensor) -> tf.Tensor:
        if variable is self.version:
            return tf.reduce_all(values >= 0)
        if variable.dtype.is_floating:
            # With such a state no push could be accepted any more, unless the rule begins with one.
            began = tf.reduce_all(tf.math.is_finite(before))
            return tf.reduce_all(tf.math.is_finite(values)) | ~began
        return tf.constant(True)

    def _state(self) -> list[tf.Variable]:
        return [self.version, *(self.slots[name] for name in sorted(self.slots))]


class BoundFunction:
    """A traced function that runs on its own variables although others share the trace.

    Not safe for concurrent calls from several threads.
    """

    def __init__(
        self, function: tf.types.experimental.ConcreteFunction, captures: Sequence[tf.Tensor]
    ) -> None:
        self.function, self.captures = function, list(captures)

    def __call__(self, *arguments: tf.Tensor) -> Any:
        private_api.bind_captures(self.function, self.captures)
        return self.function(*arguments)


class PartFunction:
    """A function of each partition, traced once for all partitions of the same kind.

    A function costs TensorFlow 1 to 4 MB of memory and 30 to 250 ms before its first call, as much
    as a partition itself, and a service has ten of them for each. If a function uses anything
    outside its partition (a rule may keep arbitrary state), each partition gets its own.
    """

    def __init__(self, signature: Sequence[tf.TensorSpec], run: Callable[..., Nest]) -> None:
        self._signature, self._run = list(signature), run
        self._traced: dict[Any, tuple[Any, list[Any], list[Any]]] = {}

    def of(self, part: Part) -> BoundFunction:
        if part.kind not in self._traced:
            function = self._trace(part)
            captures = list(function.captured_inputs)
            self._traced[part.kind] = function, captures, part.resources()
        function, captures, resources = self._traced[part.kind]
        own = {id(first): mine for first, mine in zip(resources, part.resources(), strict=True)}
        if all(id(capture) in own for capture in captures):
            return BoundFunction(function, [own[id(capture)] for capture in captures])
        function = self._trace(part)
        return BoundFunction(function, function.captured_inputs)

    def _trace(self, part: Part) -> tf.types.experimental.ConcreteFunction:
        run = functools.partial(self._run, part)
        traced = tf.function(
            lambda *arguments: run(*arguments), input_signature=self._signature, autograph=False
        )
        return traced.get_concrete_function()

    def served(self, parts: Mapping[int, Part], num_partitions: int) -> TfFunction:
        """Return one `tf.function` for several partitions, selected by number.

        It takes the number before the other arguments, and answers with `Status.REFUSED` and zeros,
        or empty tensors, for a partition that is not among them.
        """
        bound = [self.of(part) for part in parts.values()]
        places = np.full(num_partitions, -1, np.int32)
        places[list(parts)] = range(len(bound))
        is_shared = all(each.function is bound[0].function for each in bound)
        of_all = zip(*(each.captures for each in bound), strict=True) if is_shared else ()
        captures = [tf.stack(of_each) for of_each in of_all]

        def run(place: tf.Tensor, *arguments: tf.Tensor) -> Any:
            if is_shared:
                own = [tf.gather(of_each, place) for of_each in captures]
                return BoundFunction(bound[0].function, own)(*arguments)
            branches = [functools.partial(each, *arguments) for each in bound]
            return tf.switch_case(place, branches)

        @tf.function(input_signature=[_NUMBER, *self._signature], autograph=False)
        def serve(number: tf.Tensor, *arguments: tf.Tensor) -> Any:
            in_range = (number >= 0) & (number < num_partitions)
            place = tf.gather(places, tf.where(in_range, number, 0))
            return answer_if(in_range & (place >= 0), lambda: run(place, *arguments))

        return serve


class Push(NamedTuple):
    """The numbers that come with a worker's change of a partition, in the graph.

    Args:
        client: the worker, int32 scalar.
        samples: number of samples behind the change, float32 scalar.
        version: version of the partition that the worker saw last, int64 scalar.
        sequence: number of the push, int64 scalar; 0 for none.
    """

    client: tf.Tensor
    samples: tf.Tensor
    version: tf.Tensor
    sequence: tf.Tensor


class Updates:
    """Application of a rule to partitions: each push once, in its turn, and not if too stale."""

    def __init__(self, rule: UpdateRule, staleness_bound: int | None) -> None:
        self._rule, self._staleness_bound = rule, staleness_bound

    def take(self, part: Part, push: Push, change: Change) -> Taken:
        """Apply the rule if the push is acceptable; return status, new version, rule's answer."""

        def update() -> Taken:
            staleness = tf.cast(tf.maximum(part.version - push.version, 0), tf.float32)
            meta = PushMeta(push.client, push.samples, staleness, part.version.read_value())
            if not self._rule.may_wait:
                return apply_rule(self._rule, part, change, meta)
            return tf.cond(
                self.is_turn(part, meta),
                lambda: apply_rule(self._rule, part, change, meta),
                lambda: nothing(int(Status.WAIT)),
            )

        checked = functools.partial(self._unless_known, part, push, update)
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

    def _unless_known(self, part: Part, push: Push, update: Callable[[], Taken]) -> Taken:
        """Take a push unless it was already taken (its answer was lost) or comes too late."""
        numbered = push.sequence > 0
        repeated = numbered & (push.sequence <= part.sequences[push.client])
        stale = self.is_stale(part, push.version)
        closed = part.is_closed.read_value()

        def take() -> Taken:
            status, new_version, answer = update()
            taken = numbered & tf.equal(status, int(Status.OK))
            latest = tf.where(taken, push.sequence, part.sequences[push.client])
            noted = part.sequences.scatter_nd_update([[push.client]], [latest])
            with tf.control_dependencies([noted]):
                return tf.identity(status), new_version, answer

        def leave() -> Taken:
            status = tf.where(closed, int(Status.CLOSED), int(Status.STALE))
            status = tf.where(repeated, int(Status.REPEATED), status)
            return status, part.version.read_value(), part.center.read_value()

        result: Taken = tf.cond(repeated | stale | closed, leave, take)
        return result

    def is_turn(self, part: Part, meta: PushMeta) -> tf.Tensor:
        with tf.control_dependencies([self._rule.note_presence(part.slots, meta.worker)]):
            return self._rule.is_turn(part.slots, meta)

    def is_stale(self, part: Part, version: tf.Tensor) -> tf.Tensor:
        """Whether a worker saw the center too long ago, or another service's; bool scalar."""
        bound = self._staleness_bound
        if bound is None:
            return tf.constant(False)
        # A version that lies in the future belongs to another service with another center.
        return (part.version - version > bound) | (version > part.version)

    def pass_turn(self, part: Part, is_in_turn: tf.Tensor, push: Push) -> tf.Tensor:
        """End the turn of a worker whose push is refused, once: the others would wait for it."""
        if not self._rule.may_wait:
            return tf.constant(True)
        meta = PushMeta(push.client, push.samples, tf.constant(0.0), part.version.read_value())

        def take_note() -> tf.Tensor:
            latest = tf.maximum(push.sequence, part.sequences[push.client])
            noted = part.sequences.scatter_nd_update([[push.client]], [latest])
            with tf.control_dependencies([noted]):
                passed = self._rule.pass_turn(part.slots, meta)
                with tf.control_dependencies([passed]):
                    return tf.constant(True)

        def end_turn() -> tf.Tensor:
            is_new = (push.sequence < 1) | (push.sequence > part.sequences[push.client])
            is_turn = self._rule.is_turn(part.slots, meta)
            return tf.cond(is_new & is_turn, take_note, lambda: tf.constant(True))

        return tf.cond(is_in_turn, lambda: part.lock.execute(end_turn), lambda: tf.constant(True))


def nothing(status: tf.Tensor) -> Taken:
    return tf.identity(status), tf.constant(-1, tf.int64), tf.zeros([0])


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
        now = {n: value for n, value in self._read().items() if value.dtype.is_floating}
        finite = {name: is_finite(value) for name, value in now.items()}
        is_center_finite = is_finite(self._center.read_value())

        def state_is_as_before() -> tf.Tensor:
            kept = [ok | ~is_finite(self._old[name]) for name, ok in finite.items()]
            return tf.reduce_all([is_center_finite, *kept])

        are_all = tf.reduce_all([is_center_finite, *finite.values()])
        return ~tf.cond(are_all, lambda: tf.constant(True), state_is_as_before)

    def undo(self) -> None:
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
