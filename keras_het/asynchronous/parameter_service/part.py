"""One partition of the center and its state."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from keras_het import private_api
from keras_het.asynchronous.parameter_service.saved_state import LARGEST_PIECE
from keras_het.asynchronous.rules import UpdateRule


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
        # The version last seen by a client in this process, whose exchanges send no message.
        self.seen_here = tf.Variable(tf.zeros([], tf.int64), trainable=False)
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
        own = (self.center, self.version, self.sequences, self.seen_here, self.is_closed)
        others = (self.under_way, self.has_center, self.largest_norm)
        slots = (self.slots[name] for name in sorted(self.slots))
        handles = [variable.handle for variable in (*own, *others, *slots)]
        return [*handles, private_api.mutex_of(self.lock)]

    @property
    def state_sizes(self) -> tuple[int, ...]:
        """Number of elements of the version and of each of the rule's variables, by name."""
        return tuple(int(variable.shape.num_elements()) for variable in self._state())

    def state_piece(self, place: tf.Tensor, start: tf.Tensor) -> tf.Tensor:
        """Return a piece of a variable as a serialized tensor; in the graph."""

        def read(variable: tf.Variable) -> tf.Tensor:
            values = tf.reshape(variable.read_value(), [-1])
            return tf.io.serialize_tensor(values[start : start + LARGEST_PIECE])

        return tf.switch_case(place, [functools.partial(read, own) for own in self._state()])

    def set_state_piece(self, place: tf.Tensor, start: tf.Tensor, piece: tf.Tensor) -> tf.Tensor:
        """Set a piece of a variable; in the graph, under the lock.

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
