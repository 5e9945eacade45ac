"""Training steps that reduce within the worker, and what makes the workers equal again."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
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
                "Every worker trains this model on its own, and its weights differ from the "
                f"others' now. Received: {inner.loop} of the same model within a callback. Train "
                "another model there, or this one after fit has ended."
            )


class _FromTheChief:
    """The first step after a failed local training: continues from the chief's variables."""

    adopts_the_chiefs = True

    def __init__(self, model: keras.Model, strategy: HeterogeneousStrategy) -> None:
        self._model, self._strategy = model, strategy

    def __call__(self, batches: Batches) -> Nest:
        adopt_variables_of_the_chief(self._model, self._strategy)
        self._strategy.extended.training_state.export = (
            None  # its center belongs to no other backup
        )
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


# Times vary by that much; new shares for less would only move noise.
_DEAD_BAND = 0.05


class Pace:
    """Samples and seconds of this worker's local steps, without its waits for others."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._last_end = 0.0
        self._samples = 0

    def steps_done(self, samples: int) -> None:
        """Count the samples of steps that have just ended."""
        self._last_end = time.perf_counter()
        if self._began is None:
            self._began = self._last_end  # the first step was traced, which takes long
        else:
            self._samples += samples

    def take_samples(self) -> int:
        """Return the samples since this was asked for last."""
        samples, self._samples = self._samples, 0
        return samples

    def take_seconds(self) -> float:
        """Return the seconds in which they were computed, which they are now."""
        now = time.perf_counter()
        if self._began is None:
            return 0.0
        seconds, self._began = now - self._began, now
        return max(seconds, 0.0)

    def leave_out(self, since: float | None = None) -> None:
        """Leave out a wait that ends now, by default what has passed since the last step."""
        if self._began is not None:
            since = self._last_end if since is None else since
            self._began += time.perf_counter() - max(since, self._began)


def balanced_shares(
    samples: Sequence[float], seconds: Sequence[float], shares: Sequence[float]
) -> list[float] | None:
    """Return new shares of the workers, or None if the present ones are as good."""
    # A share falls by half at most, and one too small for a sample grows: who was slow for a moment
    # is found out later. All machines get the same bits. Workers without a share get none.
    known = [number for number, used in enumerate(samples) if used > 0 and seconds[number] > 0]
    unknown = [number for number, share in enumerate(shares) if share > 0 and not samples[number]]
    if not known or len(known) + len(unknown) < 2:
        return None
    speeds = {number: samples[number] / seconds[number] for number in known}
    speed = math.fsum(speeds.values())
    best = math.fsum(samples[number] for number in known) / speed
    if not unknown and max(seconds[number] for number in known) <= (1 + _DEAD_BAND) * best:
        return None
    moved = math.fsum(shares[number] for number in known)
    found = [2 * share if number in unknown else share for number, share in enumerate(shares)]
    for number in known:
        found[number] = max(moved * speeds[number] / speed, shares[number] / 2)
    return found
