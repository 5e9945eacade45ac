"""DiLoCo in which nobody waits: the outer momentum comes once for each round of samples."""

from __future__ import annotations

from typing import ClassVar

import tensorflow as tf

from keras_het.asynchronous.rules.diloco import check_outer_step
from keras_het.asynchronous.rules.update_rule import PushMeta, SendsChange, Slots

_ROUNDING = 1e-4  # the weights of a round's pushes sum to 1 but for that


class DelayedNesterov(SendsChange):
    r"""Asynchronous DiLoCo: each change moves the center at once, their momentum once a round.

    Worker i sends the change :math:`\Delta_i` of its weights since the last answer, of which the
    center takes the part that its :math:`n_i` samples are of the latest pushes of all workers,

    .. math::
        w_i = n_i \Big/ \textstyle\sum_j n_j, \qquad c \leftarrow c + \eta w_i \Delta_i,
        \qquad s \leftarrow s - w_i \Delta_i,

    where a worker that has not pushed yet counts as much as the average of those that have. A round
    is over when the weights of its pushes sum to 1: after one push of each worker, if all push
    equally often. Then comes the momentum that DiLoCo adds with each outer step,

    .. math:: u \leftarrow \mu u + s, \qquad c \leftarrow c - \eta \mu u, \qquad s \leftarrow 0.

    Momentum with every push would amplify stale directions, by which plain asynchronous training
    loses to `DiLoCo` in the paper. If all workers push from the same center, a round is exactly an
    outer step of `DiLoCo`.

    A worker continues from the answer plus what it has moved meanwhile. A lost one costs its own
    samples only: rounds of the others become longer. It may come back at any time.

    Args:
        period: local steps H of the slowest worker from one exchange to the next. With
            `period="auto"` of `HybridAggregation`, the default, faster workers take more in the
            same time (dynamic local updates).
        learning_rate: outer :math:`\eta`.
        momentum: outer :math:`\mu`, from 0 to below 1.
        num_workers: number of workers.

    Raises:
        ValueError: if a number is out of range.

    Reference:
        Liu et al., "Asynchronous Local-SGD Training for Language Modeling", 2024, arXiv 2401.09135
        (delayed Nesterov with c = 0, and dynamic local updates). The weights by samples are ours.
    """

    name: ClassVar[str] = "delayed_nesterov"
    settings = ("period", "learning_rate", "momentum", "num_workers")

    def __init__(
        self,
        num_workers: int,
        period: int = 50,
        learning_rate: float = 0.7,
        momentum: float = 0.9,
    ) -> None:
        check_outer_step(learning_rate, momentum)
        if num_workers < 1 or period < 1:
            raise ValueError(
                "num_workers and period must be at least 1. Received: "
                f"num_workers={num_workers}, period={period}."
            )
        self.period = period
        self.learning_rate = learning_rate
        self.momentum = momentum
        self.num_workers = num_workers

    @property
    def least_period(self) -> int:
        return self.period

    def slots(self, size: int) -> dict[str, tuple[int, ...]]:
        workers = (self.num_workers,)
        return {"velocity": (size,), "gradient": (size,), "samples": workers, "round": ()}

    def update(
        self, center: tf.Variable, slots: Slots, change: tf.Tensor, meta: PushMeta
    ) -> tf.Tensor:
        weight = self._weight(slots["samples"], meta)
        center.assign_add(self.learning_rate * weight * change)
        slots["gradient"].assign_sub(weight * change)
        done = slots["round"].assign_add(weight, read_value=True)

        def end_round() -> tf.Tensor:
            gradient = slots["gradient"]
            velocity = slots["velocity"].assign(
                self.momentum * slots["velocity"] + gradient, read_value=True
            )
            center.assign_sub(self.learning_rate * self.momentum * velocity)
            slots["round"].assign(0.0)
            gradient.assign(tf.zeros_like(gradient))
            return center.read_value()

        return tf.cond(done >= 1 - _ROUNDING, end_round, center.read_value)

    def _weight(self, samples: tf.Variable, meta: PushMeta) -> tf.Tensor:
        """Return the part of a round that a push is; without samples it is none."""
        own = tf.maximum(meta.samples, 0.0)
        before = samples[meta.worker]
        samples.scatter_nd_update([[meta.worker]], [tf.where(own > 0, own, before)])
        latest = samples.read_value()
        num_known = tf.reduce_sum(tf.cast(latest > 0, tf.float32))
        average = tf.math.divide_no_nan(tf.reduce_sum(latest), num_known)
        return tf.math.divide_no_nan(own, average * self.num_workers)
