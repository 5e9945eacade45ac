"""Elastic averaging in turns: the original that later forms are compared with."""

from __future__ import annotations

from typing import Any, ClassVar

import tensorflow as tf

from keras_het.asynchronous.rules.elastic_averaging import ElasticAveraging
from keras_het.asynchronous.rules.update_rule import PushMeta, Signal


class RoundRobinEASGD(ElasticAveraging):
    r"""Elastic averaging in which worker i + 1 may not push before worker i did.

    The equations are those of Async EASGD; the center takes pushes in the order 0, 1, ..., n - 1,
    0, ... and tells everybody else to try again. The result does not depend on how fast messages
    travel, but a worker that hangs holds up all others: use it as a baseline.

    A worker that was told to wait sends the same again, with the number of its first try: some
    parts may have taken it already, and must not in their next turn.

    Args:
        num_workers: n; all of them must take part.
        alpha: moving rate; None for 0.9 / n, and 0.5 for one worker.
        learning_rate: of the workers, to check the bound.

    Raises:
        ValueError: if alpha is outside the bound, as `ElasticAveraging` has it.

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
        """The number of the worker whose turn it is, and who has left."""
        del size
        return {"turn": (), "left": (self.num_workers,)}

    def note_presence(self, slots: dict[str, Any], client: Any) -> Any:
        """A worker that pushes has not left: it gets its turns again.

        Where all had left, the turn lies with one that may never come back: it moves on.
        """
        left = slots["left"] * (1.0 - tf.one_hot(client, self.num_workers))
        holder = tf.cast(slots["turn"], tf.int32)
        has_left = tf.gather(left, holder) > 0
        turn = tf.where(has_left, self._next(left, holder), slots["turn"])
        with tf.control_dependencies([slots["left"].assign(left), slots["turn"].assign(turn)]):
            return tf.constant(True)

    def is_turn(self, slots: dict[str, Any], meta: PushMeta) -> Any:
        """Whether it is the worker's turn."""
        return tf.equal(tf.cast(meta.client, tf.float32), slots["turn"])

    def update(self, center: Any, slots: dict[str, Any], change: Any, meta: PushMeta) -> Any:
        """Moves the center and gives the turn to the next worker that is still there."""
        with tf.control_dependencies([self.pass_turn(slots, meta)]):
            return super().update(center, slots, change, meta)

    def pass_turn(self, slots: dict[str, Any], meta: PushMeta) -> Any:
        """Gives the turn to the next worker that is still there."""
        following = self._next(slots["left"].read_value(), meta.client)
        return slots["turn"].assign(following, read_value=True)

    def signal(self, slots: dict[str, Any], client: Any, signal: Any) -> Any:
        """A worker that leaves is passed over from now on."""
        leaves = tf.cast(tf.equal(signal, int(Signal.LEAVE)), tf.float32)
        left = tf.maximum(slots["left"], leaves * tf.one_hot(client, self.num_workers))
        is_its_turn = tf.equal(slots["turn"], tf.cast(client, tf.float32))
        passes = is_its_turn & tf.equal(signal, int(Signal.LEAVE))
        turn = tf.where(passes, self._next(left, client), slots["turn"])
        with tf.control_dependencies([slots["left"].assign(left), slots["turn"].assign(turn)]):
            return tf.constant(0)

    def _next(self, left: Any, client: Any) -> Any:
        """The first worker after `client` that has not left, itself included at the end."""
        order = (client + 1 + tf.range(self.num_workers)) % self.num_workers
        first = tf.argmin(tf.gather(left, order))
        return tf.cast(order[first], tf.float32)
