"""Elastic averaging in turns."""

from __future__ import annotations

from typing import ClassVar

import tensorflow as tf

from keras_het.asynchronous.rules.elastic_averaging import ElasticAveraging
from keras_het.asynchronous.rules.update_rule import PushMeta, Signal, Slots


class RoundRobinEASGD(ElasticAveraging):
    r"""Elastic averaging in which worker i + 1 may not push before worker i has.

    The equations are those of Async EASGD; the center takes pushes in the order 0, 1, ..., n - 1,
    0, ... and tells all other workers to try again. The result does not depend on message speed,
    but a worker that hangs holds up all others: use it as a baseline.

    A worker that was told to wait resends the same message with the number of its first try,
    because some parts may have taken it already and must not take it again in their next turn.

    Args:
        num_workers: n; all of them must take part.
        alpha: moving rate; None for 0.9 / n, and 0.5 for one worker.
        learning_rate: learning rate of the workers, to check the bound.

    Raises:
        ValueError: if alpha is outside the bound of `ElasticAveraging`.

    Reference:
        Zhang, Choromanska and LeCun, "Deep learning with Elastic Averaging SGD", NeurIPS 2015;
        baseline of You, Buluc and Demmel, SC 2017.
    """

    name: ClassVar[str] = "round_robin_easgd"
    may_wait: ClassVar[bool] = True
    num_workers: int

    def __init__(
        self, num_workers: int, alpha: float | None = None, learning_rate: float | None = None
    ) -> None:
        super().__init__(alpha, learning_rate, num_workers)

    def slots(self, size: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the number of the worker whose turn it is, and of the left flags."""
        del size
        return {"turn": (), "left": (self.num_workers,)}

    def note_presence(self, slots: Slots, worker: tf.Tensor) -> tf.Tensor | tf.Variable:
        """Record that a pushing worker has not left: it gets its turns again.

        If all had left, the turn may lie with a worker that never comes back: it moves on.
        """
        left = slots["left"] * (1.0 - tf.one_hot(worker, self.num_workers))
        holder = tf.cast(slots["turn"], tf.int32)
        has_left = tf.gather(left, holder) > 0
        turn = tf.where(has_left, self._next(left, holder), slots["turn"])
        with tf.control_dependencies([slots["left"].assign(left), slots["turn"].assign(turn)]):
            return tf.constant(True)

    def is_turn(self, slots: Slots, meta: PushMeta) -> tf.Tensor:
        """Whether it is the worker's turn."""
        return tf.equal(tf.cast(meta.worker, tf.float32), slots["turn"])

    def update(
        self, center: tf.Variable, slots: Slots, change: tf.Tensor, meta: PushMeta
    ) -> tf.Tensor:
        """Move the center and pass the turn to the next worker that is still present."""
        with tf.control_dependencies([self.pass_turn(slots, meta)]):
            return super().update(center, slots, change, meta)

    def pass_turn(self, slots: Slots, meta: PushMeta) -> tf.Tensor | tf.Variable:
        """Pass the turn to the next worker that is still present."""
        following = self._next(slots["left"].read_value(), meta.worker)
        return slots["turn"].assign(following, read_value=True)

    def signal(self, slots: Slots, worker: tf.Tensor, signal: tf.Tensor) -> tf.Tensor:
        """Skip a worker that leaves from now on."""
        leaves = tf.cast(tf.equal(signal, int(Signal.LEAVE)), tf.float32)
        left = tf.maximum(slots["left"], leaves * tf.one_hot(worker, self.num_workers))
        is_its_turn = tf.equal(slots["turn"], tf.cast(worker, tf.float32))
        passes = is_its_turn & tf.equal(signal, int(Signal.LEAVE))
        turn = tf.where(passes, self._next(left, worker), slots["turn"])
        with tf.control_dependencies([slots["left"].assign(left), slots["turn"].assign(turn)]):
            return tf.constant(0)

    def _next(self, left: tf.Tensor, worker: tf.Tensor) -> tf.Tensor:
        """Return the first worker after `worker` that has not left, itself last."""
        order = (worker + 1 + tf.range(self.num_workers)) % self.num_workers
        first = tf.argmin(tf.gather(left, order))
        return tf.cast(order[first], tf.float32)
