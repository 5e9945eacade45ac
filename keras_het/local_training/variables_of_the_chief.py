"""Make the workers' models equal again after independent training."""

from __future__ import annotations

import keras
import tensorflow as tf

from keras_het.local_training.packed_variables import PackedVariables
from keras_het.training_strategy import TrainingStrategy


def adopt_variables_of_the_chief(model: keras.Model, strategy: TrainingStrategy) -> None:
    """Give every worker the chief's weights, moving statistics and optimizer state.

    Synchronous steps keep equal workers equal but do not make them so: with different optimizer
    states they would drift apart.
    """
    variables = [*model.variables, *model.optimizer.variables]
    unique = list({id(variable): variable for variable in variables}.values())
    for dtype in (tf.float64, tf.int64):
        same_kind = [v for v in unique if _kind(v.dtype) == dtype]
        adopt_vector_of_the_chief(PackedVariables(same_kind, strategy, dtype), strategy)


def _kind(dtype: str) -> tf.DType | None:
    """Return the float or integer type that holds every smaller one; None for other types."""
    kind = tf.as_dtype(dtype)
    if kind.is_floating:
        return tf.float64
    return tf.int64 if kind.is_integer else None


def adopt_vector_of_the_chief(variables: PackedVariables, strategy: TrainingStrategy) -> None:
    """Give every worker the chief's values, bit for bit."""
    if not variables.size:
        return
    own = variables.read()
    add = tf.function(strategy.extended.sum_over_workers, autograph=False)
    add = add.get_concrete_function(tf.TensorSpec(own.shape, own.dtype))
    variables.write(add(own if strategy.is_chief else tf.zeros_like(own)))
