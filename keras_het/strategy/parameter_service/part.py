"""One partition of the center, and what belongs to it."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_het import private_api


class Part:
    """Variables of a partition, in this process.

    Args:
        size: float32 elements.
        rule: the update rule, which may keep a state of its own for each partition.
        num_clients: workers that may push.
    """

    def __init__(self, size: int, rule: Any, num_clients: int) -> None:
        self.size = size
        self.sequences = tf.Variable(tf.zeros([num_clients], tf.int64), trainable=False)
        self.center = tf.Variable(tf.zeros([size]), trainable=False)
        self.version = tf.Variable(tf.zeros([], tf.int64), trainable=False)
        # What a client in this process saw last, which sends no message that says it.
        self.seen_here = tf.Variable(tf.zeros([], tf.int64), trainable=False)
        self.is_closed = tf.Variable(False, trainable=False)
        self.slots = rule.create_slots(self.center)
        self.lock = tf.CriticalSection()

    @property
    def kind(self) -> tuple[Any, ...]:
        """What the functions of partitions must have in common to be traced once for all."""
        slots = sorted(self.slots.items())
        return self.size, *((name, tuple(slot.shape), slot.dtype.name) for name, slot in slots)

    def resources(self) -> list[Any]:
        """Handles of the variables and of the lock, in an order that depends on the kind only."""
        own = (self.center, self.version, self.sequences, self.seen_here, self.is_closed)
        slots = (self.slots[name] for name in sorted(self.slots))
        handles = [variable.handle for variable in (*own, *slots)]
        return [*handles, private_api.mutex_of(self.lock)]

    def serialized_state(self) -> Any:
        """Version and the rule's variables, by name, as a vector of strings; in the graph."""
        return tf.stack([tf.io.serialize_tensor(v.read_value()) for v in self._state()])

    def restore(self, center: Any, state: Any) -> None:
        """Sets the center, and what `serialized_state` gave; in the graph.

        Args:
            center: float32 vector.
            state: vector of strings, empty to set the center alone.
        """
        if tf.greater(tf.size(state), 0):
            variables = self._state()
            tf.debugging.assert_equal(tf.size(state), len(variables))
            values = [
                tf.ensure_shape(tf.io.parse_tensor(state[index], variable.dtype), variable.shape)
                for index, variable in enumerate(variables)
            ]
            with tf.control_dependencies(values):  # nothing changes if one cannot be read
                for variable, value in zip(variables, values, strict=True):
                    variable.assign(value)
                self.center.assign(center)
        else:
            self.center.assign(center)

    def _state(self) -> list[Any]:
        return [self.version, *(self.slots[name] for name in sorted(self.slots))]
