"""Training steps that reduce within the worker, and what makes the workers equal again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import keras
import tensorflow as tf

from keras_het.fit.session import Batches, FitSession, Rank, StepFunction
from keras_het.packed_variables import PackedVariables
from keras_het.value_types import Nest

if TYPE_CHECKING:
    from keras_het.strategy.heterogeneous_strategy import HeterogeneousStrategy


class LocalSteps:
    """Local training steps for a session, with a count of their samples."""

    def __init__(self, fit: FitSession, strategy: HeterogeneousStrategy) -> None:
        self._fit, self._strategy = fit, strategy
        self._samples = 0
        self._is_left = False
        fit.add_layer(Rank.REDUCE_LOCALLY, self._reduce_locally)
        fit.before_inner(self._refuse_training_within)
        fit.on_end(self._end_of_fit)
        # Retrace, so that the step reduces within this worker only.
        fit.model.make_train_function(force=True)

    def _reduce_locally(self, step: StepFunction, batches: Batches) -> Nest:
        before = self._strategy.local_samples_delivered
        with self._strategy.extended.reductions_within_worker():
            try:
                return step(batches)
            finally:  # excludes what callbacks evaluate or predict
                self._samples += self._strategy.local_samples_delivered - before

    def take_samples(self) -> int:
        samples, self._samples = self._samples, 0
        return samples

    def leave(self) -> None:
        """Make later steps reduce over all workers again."""
        self._is_left = True
        self._fit.remove_layer(Rank.REDUCE_LOCALLY)
        self._fit.model.make_train_function(force=True)

    def _end_of_fit(self) -> None:
        if not self._is_left:
            self.leave()
            # After a failed training, every worker has different weights.
            self._fit.model.train_function = _FromTheChief(self._fit.model, self._strategy)

    def _refuse_training_within(self, inner: FitSession) -> None:
        if inner.loop in ("fit", "train_on_batch") and not self._is_left:
            raise RuntimeError(
                "Every worker trains this model on its own, and its weights are not those of the "
                f"others now. Received: {inner.loop} of the same model within a callback. Train "
                "another model there, or this one after fit has ended."
            )


class _FromTheChief:
    """The first step after a failed local training: continues from the chief's variables."""

    adopts_the_chiefs = True

    def __init__(self, model: keras.Model, strategy: HeterogeneousStrategy) -> None:
        self._model, self._strategy = model, strategy

    def __call__(self, batches: Batches) -> Nest:
        adopt_variables_of_the_chief(self._model, self._strategy)
        self._strategy._training_state.export = None  # its center belongs to no other backup
        self._model.make_train_function(force=True)
        return self._model.train_function(batches)


def adopt_variables_of_the_chief(model: keras.Model, strategy: HeterogeneousStrategy) -> None:
    """Give every worker the chief's weights, moving statistics and optimizer state."""
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


def adopt_vector_of_the_chief(variables: PackedVariables, strategy: HeterogeneousStrategy) -> None:
    """Give every worker the chief's values, bit for bit."""
    if not variables.size:
        return
    own = variables.read()
    add = tf.function(strategy.extended.sum_over_workers, autograph=False)
    add = add.get_concrete_function(tf.TensorSpec(own.shape, own.dtype))
    variables.write(add(own if strategy.is_chief else tf.zeros_like(own)))
