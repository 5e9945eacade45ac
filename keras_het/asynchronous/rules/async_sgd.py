"""Asynchronous gradient descent on the center, by any elementwise optimizer of Keras."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from keras_het import private_api
from keras_het.asynchronous.rules.update_rule import PushMeta, SendsGradient, Slots, Update
from keras_het.exchange.message import Vector

Identifier: TypeAlias = str | dict[str, Any] | keras.optimizers.Optimizer

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
    optimizer's step with the rate :math:`f_i \eta(v)`. For Keras's SGD these are the same; those
    that divide by the size of gradients (Adam) remember a gradient in full, whatever its factor.
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
        *("learning_rate", "momentum", "reference_samples", "damps_staleness", "warm_up_pushes"),
    )

    def __init__(
        self,
        learning_rate: float | None = None,
        momentum: float = 0.0,
        reference_samples: float | None = None,
        damps_staleness: bool = False,
        warm_up_pushes: int = 0,
        optimizer: Identifier | None = None,
    ) -> None:
        self.learning_rate = learning_rate
        self.momentum = momentum
        self.reference_samples = reference_samples
        self.damps_staleness = damps_staleness
        self.warm_up_pushes = warm_up_pushes
        self._check_ranges(optimizer)
        self._optimizer = None if optimizer is None else ServerOptimizer(optimizer)

    def _check_ranges(self, optimizer: Identifier | None) -> None:
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

    def create_slots(self, center: Vector) -> Slots:
        if self._optimizer:
            return self._optimizer.of_size(len(center)).initial
        return {"momentum": np.zeros_like(center)} if self.momentum else {}

    def update(self, center: Vector, slots: Slots, change: Vector, meta: PushMeta) -> Update:
        factor = self.factor(meta)
        if self._optimizer:
            instance = self._optimizer.of_size(len(center))
            return instance.step(center, slots, change, meta.version, factor)
        change = factor * change
        if self.momentum:
            change = np.float32(self.momentum) * slots["momentum"] + change
            slots = {**slots, "momentum": change}
        center = center - np.float32(self.learning_rate) * change
        return Update(center, slots, center)

    def factor(self, meta: PushMeta) -> np.float32:
        """Give what a push's gradient is scaled by: its samples, warm-up and staleness."""
        one = factor = np.float32(1)
        if self.reference_samples is not None:
            factor = np.float32(meta.samples) / np.float32(self.reference_samples)
            if self.warm_up_pushes and factor > 1:
                part = np.float32(meta.version) / np.float32(self.warm_up_pushes)
                factor = one + (factor - one) * min(part, one)
        if self.damps_staleness:
            factor /= np.float32(max(meta.staleness, 1))
        return factor

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "optimizer": self._optimizer and keras.optimizers.serialize(self._optimizer.optimizer),
        }


class ServerOptimizer:
    """A Keras optimizer as pure functions: one instance for each size that parts have."""

    def __init__(self, identifier: Identifier) -> None:
        self.optimizer = keras.optimizers.get(identifier)
        self._config = check_elementwise(self.optimizer)
        self._instances: dict[int, _Instance] = {}
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave the instances and locks out of copies."""
        return ServerOptimizer, (self.optimizer,)

    def of_size(self, size: int) -> _Instance:
        with self._lock:
            if size not in self._instances:
                # In a thread of its own, which no scope of a strategy reaches into: Keras would
                # sum the gradients over the replicas of that strategy.
                with ThreadPoolExecutor(1) as thread:
                    made = thread.submit(_Instance, type(self.optimizer), self._config, size)
                self._instances[size] = made.result()
            return self._instances[size]


class _Instance:
    """An optimizer and a center, whose variables mean nothing from one step to the next."""

    def __init__(
        self, kind: type[keras.optimizers.Optimizer], config: dict[str, Any], size: int
    ) -> None:
        self._base_rate = config["learning_rate"]
        if isinstance(self._base_rate, dict):
            self._base_rate = keras.optimizers.schedules.deserialize(self._base_rate)
        with tf.device("CPU:0"):
            self._optimizer = kind.from_config({**config, "learning_rate": 1.0})
            # A function is the documented way to give Keras a rate that it does not store itself.
            self._rate: float | tf.Tensor = 1.0
            self._optimizer.learning_rate = lambda: self._rate
            self._variables = {"center": tf.Variable(tf.zeros([size]))}
            self._optimizer.build([self._variables["center"]])
            # All state by position: Keras numbers its names differently for each instance.
            for index, variable in enumerate(self._optimizer.variables):
                self._variables[f"optimizer_{index}"] = variable.value
            specs = {name: tf.TensorSpec(v.shape, v.dtype) for name, v in self._variables.items()}
            numbers = tf.TensorSpec([], tf.int64), tf.TensorSpec([])
            self._step = tf.function(self._apply).get_concrete_function(
                specs, tf.TensorSpec([size]), *numbers
            )
        self._lock = threading.Lock()
        self.initial = _arrays(self._variables)
        del self.initial["center"]

    def step(
        self, center: Vector, slots: Slots, gradient: Vector, version: int, factor: np.float32
    ) -> Update:
        arguments = {"center": center, **slots}, gradient, np.int64(version), factor
        with self._lock:
            after = _arrays(self._step(*tf.nest.map_structure(tf.constant, arguments)))
        center = after.pop("center")
        return Update(center, after, center)

    def _apply(
        self, values: dict[str, tf.Tensor], gradient: tf.Tensor, version: tf.Tensor, factor: float
    ) -> dict[str, tf.Tensor]:
        for name, variable in self._variables.items():
            variable.assign(values[name])
        self._optimizer.iterations.assign(version)
        rate = self._base_rate(version) if callable(self._base_rate) else self._base_rate
        self._rate = tf.cast(rate, tf.float32) * factor
        self._optimizer.apply([gradient], [self._variables["center"]])
        self._rate = 1.0
        return {name: variable.read_value() for name, variable in self._variables.items()}


def _arrays(values: dict[str, Any]) -> dict[str, Vector]:
    """Return copies; `numpy` gives a number where there are no dimensions."""
    return {name: np.asarray(value.numpy()) for name, value in values.items()}


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
    rate = private_api.learning_rate_of(optimizer)
    is_schedule = isinstance(rate, keras.optimizers.schedules.LearningRateSchedule)
    if callable(rate) and not is_schedule:
        raise ValueError(
            "The learning rate of the center's optimizer must be a number or a "
            f"LearningRateSchedule. Received: {rate}, a function that cannot be copied for each "
            "part."
        )
    return dict(optimizer.get_config())
