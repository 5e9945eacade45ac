"""A Keras optimizer on parts of the center, each with its own state and step count."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from keras_het import private_api

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
