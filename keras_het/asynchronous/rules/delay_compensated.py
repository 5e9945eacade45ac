"""Asynchronous gradient descent that corrects stale gradients to first order."""

from __future__ import annotations

from typing import ClassVar, cast

import tensorflow as tf

from keras_het.asynchronous.rules.update_rule import PushMeta, SendsGradient, Slots

_EPSILON = 1e-7


class DelayCompensated(SendsGradient):
    r"""DC-ASGD, which adds the gradient's estimated change since the worker saw the center.

    With :math:`w_i` the center at which worker i computed its gradient, elementwise,

    .. math:: c \leftarrow c - \eta\,\bigl(g_i + \lambda\, g_i \odot g_i \odot (c - w_i)\bigr),
              \qquad w_i \leftarrow c.

    With a `decay` this is DC-ASGD-a: :math:`\lambda` becomes
    :math:`\lambda / \sqrt{s_i + 10^{-7}}`, where
    :math:`s_i \leftarrow d\,s_i + (1 - d)\,g_i \odot g_i`. The service keeps one copy of the center
    for each worker, from its last answer. A worker that has since received the center in another
    way (it joins or comes back, its push was too stale, or an answer was lost) has seen a different
    version: its first gradient is taken without compensation.

    Args:
        learning_rate: :math:`\eta`.
        compensation: :math:`\lambda`; the authors use 0.04 without and 2 with `decay` on CIFAR-10
            (from memory).
        num_workers: number of workers.
        decay: d of DC-ASGD-a, from 0 to below 1; None for DC-ASGD-c.

    Raises:
        ValueError: if a number is out of range.

    Reference:
        Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay Compensation", ICML 2017,
        and the authors' updaters.
    """

    name: ClassVar[str] = "delay_compensated"
    settings = ("learning_rate", "compensation", "num_workers", "decay")
    rows_of_workers: ClassVar[frozenset[str]] = frozenset({"seen", "mean_square"})

    def __init__(
        self,
        learning_rate: float,
        compensation: float,
        num_workers: int,
        decay: float | None = None,
    ) -> None:
        in_range = learning_rate > 0 and compensation >= 0 and num_workers >= 1
        if not in_range or (decay is not None and not 0 <= decay < 1):
            raise ValueError(
                "Expected learning_rate > 0, compensation >= 0, num_workers >= 1 and decay None or "
                f"from 0 to below 1. Received: {learning_rate=}, {compensation=}, {num_workers=}, "
                f"{decay=}."
            )
        self.learning_rate = learning_rate
        self.compensation = compensation
        self.num_workers = num_workers
        self.decay = decay

    def slots(self, size: int) -> dict[str, tuple[int, ...]]:
        slots: dict[str, tuple[int, ...]] = {"seen": (self.num_workers, size)}
        if self.decay is not None:
            slots["mean_square"] = (self.num_workers, size)
        return slots

    def create_slots(self, center: tf.Variable) -> Slots:
        versions = tf.Variable(tf.zeros([self.num_workers], tf.int64), trainable=False)
        return {**super().create_slots(center), "seen_version": versions}

    def update(
        self, center: tf.Variable, slots: Slots, change: tf.Tensor, meta: PushMeta
    ) -> tf.Tensor:
        worker = tf.clip_by_value(meta.worker, 0, self.num_workers - 1)
        version = cast(tf.Tensor, meta.version)
        seen_version = version - tf.cast(meta.staleness, tf.int64)
        known = (seen_version > 0) & tf.equal(seen_version, slots["seen_version"][worker])
        # Gathered: an index would first copy the rows of all workers.
        moved = tf.where(known, center - tf.gather(slots["seen"], worker), tf.zeros_like(change))
        square = change * change
        strength: float | tf.Tensor = self.compensation
        if self.decay is not None:
            mean = self.decay * tf.gather(slots["mean_square"], worker)
            mean += (1 - self.decay) * square
            _set_row(slots["mean_square"], worker, mean)
            strength = self.compensation * tf.math.rsqrt(mean + _EPSILON)
        center.assign_sub(self.learning_rate * (change + strength * square * moved))
        answer = center.read_value()
        _set_row(slots["seen"], worker, answer)
        _set_row(slots["seen_version"], worker, version + 1)
        return answer


def _set_row(variable: tf.Variable, row: tf.Tensor, value: tf.Tensor) -> None:
    variable.scatter_nd_update([[row]], value[None])
