"""Asynchronous gradient descent on the center, by any elementwise optimizer of Keras."""

from __future__ import annotations

from typing import Any, ClassVar

import keras
import tensorflow as tf

from keras_het import private_api
from keras_het.asynchronous.rules.update_rule import PushMeta, SendsGradient, Slots

_INSTANCE = "keras_het_optimizer"

ELEMENTWISE = (
    keras.optimizers.SGD,
    keras.optimizers.RMSprop,
    keras.optimizers.Adam,
    keras.optimizers.AdamW,
    keras.optimizers.Adamax,
    keras.optimizers.Nadam,
    keras.optimizers.Adagrad,
    keras.optimizers.Adadelta,
    keras.optimizers.Ftrl,
    keras.optimizers.Lion,
)
"""Kinds whose step for one element depends neither on other elements nor on the shape."""

_REFUSED = {
    "clipnorm": "clips by the norm of a whole variable, which parts of the center do not have; use "
    "clipvalue",
    "global_clipnorm": "clips by the norm of all variables, which a part of the center does not "
    "know; use clipvalue",
    "use_ema": "averages weights for the end of fit, which the center does not see",
    "gradient_accumulation_steps": "would accumulate gradients of different workers; let the "
    "workers accumulate",
    "loss_scale_factor": "belongs where gradients are computed, on the workers",
}


class AsyncSGD(SendsGradient):
    r"""A step of an optimizer on the center for each incoming gradient.

    With :math:`\tau` updates since the worker last saw the center, :math:`A_i` samples behind its
    mean gradient :math:`g_i` (of its steps, all weighted equally), and v updates so far, the
    gradient counts by the factor

    .. math::
        f_i = \frac{A_i}{A} \; warm(v) \; \frac{1}{\max(1, \tau)}

    of which all parts are optional. With a `learning_rate` this is gradient descent with momentum,
    :math:`u \leftarrow m\,u + f_i g_i,\; c \leftarrow c - \eta u`; with an `optimizer` it is that
    optimizer's step with the rate :math:`f_i \eta(v)`, and its state is kept with the center. For
    Keras's SGD these are the same; optimizers that divide by the size of gradients (Adam) remember
    a gradient in full, whatever its factor.
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
        return {"momentum": (size,)} if self.momentum else {}

    def create_slots(self, center: tf.Variable) -> Slots:
        return self._optimizer.build(center) if self._optimizer else super().create_slots(center)

    def update(
        self, center: tf.Variable, slots: Slots, change: tf.Tensor, meta: PushMeta
    ) -> tf.Tensor:
        if self._optimizer:
            return self._optimizer.step(center, change, meta.version, self.factor(meta))
        change = self.factor(meta) * change
        if self.momentum:
            change = slots["momentum"].assign(self.momentum * slots["momentum"] + change)
        center.assign_sub(self.learning_rate * change)
        return center.read_value()

    def factor(self, meta: PushMeta) -> tf.Tensor:
        """Give what a push's gradient is scaled by: its samples, warm-up and staleness."""
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
        return {
            **super().get_config(),
            "optimizer": self._optimizer and keras.optimizers.serialize(self._optimizer.optimizer),
        }


class ServerOptimizer:
    """One instance of a Keras optimizer for each part of the center."""

    def __init__(self, identifier: str | dict[str, Any] | keras.optimizers.Optimizer) -> None:
        self.optimizer = keras.optimizers.get(identifier)
        self._config = check_elementwise(self.optimizer)

    def build(self, center: tf.Variable) -> dict[str, tf.Variable]:
        """Create the state for a part."""
        instance = _Instance(type(self.optimizer), self._config, center)
        # Stored on the part itself and freed with it, however many trainings the rule serves.
        setattr(center, _INSTANCE, instance)
        return instance.variables

    def step(
        self, center: tf.Variable, gradient: tf.Tensor, version: tf.Tensor | None, factor: tf.Tensor
    ) -> tf.Tensor:
        """Take a step; called in the graph."""
        instance = getattr(center, _INSTANCE, None)
        if instance is None:
            raise ValueError(
                "This part of the center has no optimizer. Received: a variable that "
                "`create_slots` was not called with. Call it once for each part, before `update`."
            )
        return instance.step(gradient, version, factor)


class _Instance:
    def __init__(
        self, kind: type[keras.optimizers.Optimizer], config: dict[str, Any], center: tf.Variable
    ) -> None:
        self._center = center
        self._base_rate = config["learning_rate"]
        if isinstance(self._base_rate, dict):
            self._base_rate = keras.optimizers.schedules.deserialize(self._base_rate)
        self._optimizer = kind.from_config({**config, "learning_rate": 1.0})
        # A function is the documented way to give Keras a rate that it does not store itself.
        self._rate: float | tf.Tensor = 1.0
        self._optimizer.learning_rate = lambda: self._rate
        self._optimizer.build([center])
        # Traced here and now: otherwise Keras would sum gradients over the replicas of any strategy
        # in whose scope a later caller runs.
        self._step = tf.function(self._apply).get_concrete_function(
            tf.TensorSpec(center.shape), tf.TensorSpec([], tf.int64), tf.TensorSpec([])
        )

    @property
    def variables(self) -> dict[str, tf.Variable]:
        """All state by position, because Keras numbers its names differently for each instance."""
        return {
            f"optimizer_{index}": variable.value
            for index, variable in enumerate(self._optimizer.variables)
        }

    def step(self, gradient: tf.Tensor, version: tf.Tensor | None, factor: tf.Tensor) -> tf.Tensor:
        """Take a step; called in the graph, under the part's lock."""
        count = self._optimizer.iterations.value.read_value() if version is None else version
        return self._step(gradient, tf.cast(count, tf.int64), tf.cast(factor, tf.float32))

    def _apply(self, gradient: tf.Tensor, version: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
        self._optimizer.iterations.assign(version)
        rate = self._base_rate
        if callable(rate):
            rate = rate(version)
        self._rate = tf.cast(rate, tf.float32) * factor
        self._optimizer.apply([gradient], [self._center])
        self._rate = 1.0
        # The entire state is written before the answer leaves and the part's lock is released.
        with tf.control_dependencies([tf.identity(v) for v in self.variables.values()]):
            return self._center.read_value()


def check_elementwise(optimizer: keras.optimizers.Optimizer) -> dict[str, Any]:
    """Refuse optimizers that cannot work on parts of a vector.

    A custom optimizer is accepted if its attribute `is_elementwise` is true.
    """
    kind = type(optimizer)
    if kind not in ELEMENTWISE and not getattr(optimizer, "is_elementwise", False):
        names = ", ".join(known.__name__ for known in ELEMENTWISE)
        raise ValueError(
            "The center is one long vector, cut into parts that are updated on their own, so its "
            f"optimizer must treat every element by itself. Received: {kind.__name__}, which needs "
            "whole variables (a norm, a shape or a factorization of each), or is not known. Use "
            f"one of {names}; or run it on the workers, with the rule Delta; or give an optimizer "
            "of your own the attribute is_elementwise = True."
        )
    for setting, reason in _REFUSED.items():
        if getattr(optimizer, setting, None):
            raise ValueError(
                f"The center's optimizer cannot have {setting}: it {reason}. Received: "
                f"{kind.__name__}({setting}={getattr(optimizer, setting)})."
            )
    if getattr(optimizer, "_exclude_from_weight_decay_pattern", None) or getattr(
        optimizer, "_exclude_from_weight_decay", None
    ):
        raise ValueError(
            "The center's optimizer does not know which elements belong to which variable. "
            f"Received: {kind.__name__} with exclude_from_weight_decay. Run it on the workers, "
            "with the rule Delta."
        )
    return _config(optimizer)


def _config(optimizer: keras.optimizers.Optimizer) -> dict[str, Any]:
    rate = private_api.learning_rate_of(optimizer)
    is_schedule = isinstance(rate, keras.optimizers.schedules.LearningRateSchedule)
    if callable(rate) and not is_schedule:
        raise ValueError(
            "The learning rate of the center's optimizer must be a number or a "
            f"LearningRateSchedule. Received: {rate}, a function that cannot be copied for each "
            "part."
        )
    return dict(optimizer.get_config())
