"""Asynchronous gradient descent on the center."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_het.strategy.rules.update_rule import PushMeta


class AsyncSGD:
    r"""Gradient descent with momentum, one update for each push.

    .. math:: u \leftarrow m\,u + g_i, \qquad c \leftarrow c - \eta\,\frac{A_i}{A}\,\frac{1}{d}\,u

    A_i are the samples behind the gradient :math:`g_i` (a mean), A is `reference_samples`: linear
    scaling for large mini-batches. With `damps_staleness`, d is the number of updates since the
    worker last saw the center, at least 1; else d = 1. With n workers asynchrony acts like a
    momentum of about 1 - 1/n of its own, so choose m smaller than for one device.

    Args:
        learning_rate: :math:`\eta`.
        momentum: m, from 0 to below 1.
        reference_samples: A; None for no scaling.
        damps_staleness: whether to divide by the staleness.

    Raises:
        ValueError: if a number is out of its range.

    Reference:
        Zhang, Gupta, Lian and Liu, "Staleness-aware Async-SGD for Distributed Deep Learning", IJCAI
        2016 (damping); Goyal et al., "Accurate, Large Minibatch SGD", 2017 (linear scaling); Kim et
        al., Cluster Computing 23, 2020 (asynchronous large mini-batches; how they combine the two
        is not in the part that could be read, this is ours).
    """

    name = "async_sgd"
    is_atomic = True

    def __init__(
        self,
        learning_rate: float,
        momentum: float = 0.0,
        reference_samples: float | None = None,
        damps_staleness: bool = False,
    ) -> None:
        if not learning_rate > 0 or not 0 <= momentum < 1:
            raise ValueError(
                "learning_rate must be positive and momentum from 0 to below 1. Received: "
                f"learning_rate={learning_rate}, momentum={momentum}."
            )
        if reference_samples is not None and not reference_samples > 0:
            raise ValueError(
                f"reference_samples must be positive, or None. Received: {reference_samples}."
            )
        self._learning_rate = learning_rate
        self._momentum = momentum
        self._reference_samples = reference_samples
        self._damps_staleness = damps_staleness

    def slots(self, size: int) -> dict[str, tuple[int, ...]]:
        """The momentum, if there is one."""
        return {"momentum": (size,)} if self._momentum else {}

    def update(self, center: Any, slots: dict[str, Any], change: Any, meta: PushMeta) -> Any:
        """Takes one step against the gradient `change`."""
        if self._momentum:
            change = slots["momentum"].assign(self._momentum * slots["momentum"] + change)
        center.assign_sub(self.rate(meta) * change)
        return center.read_value()

    def rate(self, meta: PushMeta) -> Any:
        """Learning rate of a push, float32 scalar."""
        rate = tf.constant(self._learning_rate, tf.float32)
        if self._reference_samples is not None:
            rate *= meta.samples / self._reference_samples
        if self._damps_staleness:
            rate /= tf.maximum(meta.staleness, 1.0)
        return rate
