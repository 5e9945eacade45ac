"""Asynchronous gradient descent on the center."""

from __future__ import annotations

from typing import Any, ClassVar

import keras
import tensorflow as tf

from keras_het.asynchronous.rules.server_optimizer import ServerOptimizer
from keras_het.asynchronous.rules.update_rule import PushMeta, Slots
from keras_het.asynchronous.rules.worker_sides import SendsGradient


class AsyncSGD(SendsGradient):
    r"""A step of an optimizer on the center for each incoming gradient.

    With :math:`\tau` updates since the worker last saw the center, :math:`A_i` samples behind its
    mean gradient :math:`g_i` (of its steps, all weighted equally), and v updates so far, the
    learning rate of the step is

    .. math::
        \eta_i = \eta(v) \; \frac{A_i}{A} \; warm(v) \; \frac{1}{\max(1, \tau)}

    where all factors but the first are optional. With a `learning_rate` this is gradient descent
    with momentum, :math:`u \leftarrow m\,u + g_i,\; c \leftarrow c - \eta_i u`; with an `optimizer`
    it is that optimizer's step with the rate :math:`\eta_i`, and its state is kept with the center.
    Gradual warm-up starts at the base rate: :math:`k \, warm(v) = 1 + (k - 1) \min(1, v / V)` for
    :math:`k = A_i / A > 1`. With n workers, asynchrony itself acts like a momentum of about 1 -
    1/n, so choose m smaller than for one device.

    Args:
        learning_rate: :math:`\eta`, for gradient descent with `momentum`.
        momentum: m, from 0 to below 1.
        reference_samples: A; None for no scaling by samples.
        damps_staleness: whether to divide by the staleness.
        warm_up_pushes: V, number of updates over which a rate raised by samples is reached; 0 for
            none.
        optimizer: instead of `learning_rate`, anything that `keras.optimizers.get` accepts, of an
            elementwise kind: SGD, RMSprop, Adam, AdamW, Adamax, Nadam, Adagrad, Adadelta, Ftrl,
            Lion. Schedules of its rate follow the center's count of updates.

    Raises:
        ValueError: if a number is out of range, there is not exactly one of `learning_rate` and
            `optimizer`, or the optimizer does not work on parts of a vector.

    Reference:
        Zhang, Gupta, Lian and Liu, "Staleness-aware Async-SGD for Distributed Deep Learning", IJCAI
        2016 (damping); Goyal et al., "Accurate, Large Minibatch SGD", 2017 (linear scaling,
        warm-up); Kim et al., Cluster Computing 23, 2020 (asynchronous large mini-batches; how they
        combine the two is not in the part available to us; this combination is ours).
    """

    name: ClassVar[str] = "async_sgd"
    settings = (
        "learning_rate",
        "momentum",
        "reference_samples",
        "damps_staleness",
        "warm_up_pushes",
    )

    def __init__(
        self,
        learning_rate: float | None = None,
        momentum: float = 0.0,
        reference_samples: float | None = None,
        damps_staleness: bool = False,
        warm_up_pushes: int = 0,
        optimizer: str | dict[str, Any] | keras.optimizers.Optimizer | None = None,
    ) -> None:
        self.learning_rate = learning_rate
        self.momentum = momentum
        self.reference_samples = reference_samples
        self.damps_staleness = damps_staleness
        self.warm_up_pushes = warm_up_pushes
        self._check_ranges(optimizer)
        self._optimizer = None if optimizer is None else ServerOptimizer(optimizer)

    def _check_ranges(
        self, optimizer: str | dict[str, Any] | keras.optimizers.Optimizer | None
    ) -> None:
        if (self.learning_rate is None) == (optimizer is None):
            raise ValueError(
                "AsyncSGD takes either a learning_rate, for gradient descent with momentum, or an "
                f"optimizer. Received: learning_rate={self.learning_rate}, optimizer={optimizer}."
            )
        rate = 1.0 if self.learning_rate is None else self.learning_rate
        if not rate > 0 or not 0 <= self.momentum < 1 or (optimizer and self.momentum):
            raise ValueError(
                "learning_rate must be positive and momentum from 0 to below 1 (0 beside an "
                f"optimizer, which has its own). Received: learning_rate={self.learning_rate}, "
                f"momentum={self.momentum}."
            )
        if self.reference_samples is not None and not self.reference_samples > 0:
            raise ValueError(
                f"reference_samples must be positive, or None. Received: {self.reference_samples}."
            )
        if self.warm_up_pushes < 0 or (self.warm_up_pushes and self.reference_samples is None):
            raise ValueError(
                "warm_up_pushes must be at least 0, and needs reference_samples: what is warmed up "
                f"is the factor of linear scaling. Received: {self.warm_up_pushes}."
            )

    def slots(self, size: int) -> dict[str, tuple[int, ...]]:
        """Return the shape of the momentum, if there is one."""
        return {"momentum": (size,)} if self.momentum else {}

    def create_slots(self, center: tf.Variable) -> Slots:
        """Create the momentum, or the optimizer's variables."""
        return self._optimizer.build(center) if self._optimizer else super().create_slots(center)

    def update(
        self, center: tf.Variable, slots: Slots, change: tf.Tensor, meta: PushMeta
    ) -> tf.Tensor:
        """Take one step against the gradient `change`."""
        if self._optimizer:
            return self._optimizer.step(center, change, meta.version, self.factor(meta))
        if self.momentum:
            change = slots["momentum"].assign(self.momentum * slots["momentum"] + change)
        center.assign_sub(self.learning_rate * self.factor(meta) * change)
        return center.read_value()

    def factor(self, meta: PushMeta) -> tf.Tensor:
        """Return the factor of a push's learning rate, float32 scalar."""
        factor = tf.constant(1.0)
        if self.reference_samples is not None:
            factor = self._warmed(meta.samples / self.reference_samples, meta)
        if self.damps_staleness:
            factor /= tf.maximum(meta.staleness, 1.0)
        return factor

    def _warmed(self, scale: tf.Tensor, meta: PushMeta) -> tf.Tensor:
        if not self.warm_up_pushes:
            return scale
        part = tf.minimum(tf.cast(meta.version, tf.float32) / self.warm_up_pushes, 1.0)
        return tf.where(scale > 1, 1.0 + (scale - 1.0) * part, scale)

    def get_config(self) -> dict[str, Any]:
        """Return the settings."""
        return {
            **super().get_config(),
            "optimizer": self._optimizer and keras.optimizers.serialize(self._optimizer.optimizer),
        }
