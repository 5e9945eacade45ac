"""A Keras optimizer that takes its steps on parts of the center."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from keras_het import private_api
from keras_het.exchange.message import Vector
from keras_het.planning.argument_checks import expect
from keras_het.rules.update_rule import Slots, Update

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

_REMEMBERS = keras.optimizers.Adam, keras.optimizers.AdamW, keras.optimizers.Adamax
"""Kinds that add gradients up, undivided, and divide the sum by their size in each step."""

_NAMES = "names variables, which parts of the center do not have; run it on the workers, by Delta"
_REFUSED = {
    "clipnorm": "clips by the norm of a whole variable, which parts of the center do not have; use "
    "clipvalue",
    "global_clipnorm": "clips by the norm of all variables, which a part of the center does not "
    "know; use clipvalue",
    "use_ema": "averages weights for the end of fit, which the center does not see",
    "gradient_accumulation_steps": "would accumulate gradients of different workers; let the "
    "workers accumulate",
    "loss_scale_factor": "belongs where gradients are computed, on the workers",
    "_exclude_from_weight_decay": _NAMES,
    "_exclude_from_weight_decay_pattern": _NAMES,
}


class ServerOptimizer:
    """A Keras optimizer as pure functions: one instance for each size that parts have."""

    def __init__(self, identifier: Identifier, has_factor: bool = False) -> None:
        try:
            self.optimizer = keras.optimizers.get(identifier)
        except (ValueError, TypeError):
            self.optimizer = None
        is_one = isinstance(self.optimizer, keras.optimizers.Optimizer)
        expect(is_one, 'what keras.optimizers.get accepts, such as "adam"', optimizer=identifier)
        self._config = check_elementwise(self.optimizer)
        if has_factor and type(self.optimizer) is keras.optimizers.Nadam:
            raise ValueError(
                "Nadam cannot weight pushes by samples or staleness: its step uses each gradient "
                "both directly and through its first moment. Received: AsyncSGD(optimizer=Nadam) "
                "with reference_batch_size or staleness_damping. Use Adam, or leave both out."
            )
        self._instances: dict[int, _Instance] = {}
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave the instances and locks out of copies."""
        return ServerOptimizer, (self.optimizer,)

    def serialized(self) -> dict[str, Any]:
        return dict(keras.optimizers.serialize(self.optimizer))

    def for_size(self, size: int) -> _Instance:
        with self._lock:
            if size not in self._instances:
                # In a separate thread, which no scope of a strategy reaches into: Keras would
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
            # The factor scales the gradient where it enters the first moment. As part of the rate
            # it would scale the gradients of all earlier pushes, too.
            self._moment, self._beta = None, config.get("beta_1", 0.0)
            if kind in _REMEMBERS and self._beta > 0:
                variables = self._optimizer.variables
                self._moment = next(v.value for v in variables if v.name.endswith("momentum"))
            self._clip = config.get("clipvalue")
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
        self._rate = tf.cast(rate, tf.float32)
        if self._moment is None:
            self._rate *= factor
        else:
            # Keras adds (1 - beta) times the gradient to beta times what this leaves.
            clip = self._clip or float("inf")
            more = (factor - 1) * tf.clip_by_value(gradient, -clip, clip)
            self._moment.assign_add((1 - self._beta) / self._beta * more)
        self._optimizer.apply([gradient], [self._variables["center"]])
        self._rate = 1.0
        return {name: variable.read_value() for name, variable in self._variables.items()}


def _arrays(values: dict[str, Any]) -> dict[str, Vector]:
    """Return copies; `numpy` gives a number where there are no dimensions."""
    return {name: np.asarray(value.numpy()) for name, value in values.items()}


def check_elementwise(optimizer: keras.optimizers.Optimizer) -> dict[str, Any]:
    """Refuse optimizers that cannot work on parts of a vector, unless they are elementwise."""
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
                f"The center's optimizer cannot have {setting.strip('_')}: it {reason}. Received: "
                f"{kind.__name__} with {getattr(optimizer, setting)}."
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
