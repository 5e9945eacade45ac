"""Grow the global batch as far as the gradient noise allows."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable

import keras
import tensorflow as tf

from keras_het.fit.model_strategy import data_of_fit
from keras_het.fit.shorter_epochs import ShorterEpochs
from keras_het.planning.global_batch import choose_global_batch, rate_factor_of_batch
from keras_het.planning.noise_scale import SmoothedNoiseScale, noise_scale_estimate
from keras_het.strategy.measure.compute_times import StepTimes
from keras_het.training_strategy import TrainingStrategy

_logger = logging.getLogger("keras_het")

FIRST_DECISION_AFTER = 20
DECIDE_EVERY = 16
_OVERHEAD_MEMORY = 0.9


class GlobalBatchGrowth:
    r"""Choice of the global batch with the best goodput, between two epochs.

    The replicas' gradients show how much of a gradient is noise, :math:`S`, and how much is signal,
    :math:`|G|^2`, without bias for unequal shares. A batch of s times the base then makes
    :math:`r(s) = (S/B_0 + |G|^2) / (S/(sB_0) + |G|^2)` times the progress, and with the predicted
    step time one batch has the best progress a second. The batch never shrinks, and at most doubles
    from one epoch to the next; the learning rate is multiplied by :math:`r(s_{new}) / r(s_{old})`
    for `SGD` (AdaScale), by its square root for the other optimizers.

    The chief decides; its decision travels with the next steps, and all workers follow together.
    """

    def __init__(
        self,
        strategy: TrainingStrategy,
        model: keras.Model,
        largest: int | None,
        step_seconds: Callable[[int], float | None],
    ) -> None:
        _check_cluster(strategy)
        self._data = data_of_fit(model, strategy)
        _check(strategy, model, self._data)
        self._strategy, self._model = strategy, model
        self._step_seconds = step_seconds
        # A backup or an earlier fit may have enlarged it: bound and rate refer to the first size.
        self.current = int(self._data.global_batch_size)
        self.base = int(getattr(self._data, "first_global_batch_size", None) or self.current)
        self.largest = 8 * self.base if largest is None else int(largest)
        if self.largest < self.base:
            raise ValueError(
                "max_global_batch must not be below the global batch of the data. Received: "
                f"{self.largest}; the data has {self.base}."
            )
        self._noise = SmoothedNoiseScale()
        self._observed = 0
        self._overhead = 0.0
        self._last_end: float | None = None
        self._wanted = (0, 1.0)
        # discards the decision of an earlier fit
        strategy.compute_times.control.send_batch(0, 1.0)
        self._is_adaptive = not isinstance(_innermost(model.optimizer), keras.optimizers.SGD)
        self._shorter_epochs = ShorterEpochs()

    @property
    def noise_scale(self) -> float | None:
        """Variance over squared norm, in samples; None before the first measurement."""
        estimate = self._noise.value
        return None if estimate is None else estimate.noise_scale

    def observe(self, steps: list[StepTimes]) -> None:
        """Record steps and let the chief decide."""
        for step in steps:
            if (step.shares > 0).sum() < 2:
                continue
            self._noise.add(
                noise_scale_estimate(
                    step.shares, step.gradient_squares, step.global_gradient_square
                )
            )
            self._observed += 1
        self._note_overhead(steps)
        self._wanted = (steps[-1].wanted_batch, steps[-1].rate_factor)
        is_due = self._observed >= FIRST_DECISION_AFTER and self._observed % DECIDE_EVERY < len(
            steps
        )
        if is_due and self._strategy.is_chief:
            self._decide()

    def _note_overhead(self, steps: list[StepTimes]) -> None:
        """Estimate a step's time beyond computing: the collective, the update, Python."""
        now = time.perf_counter()
        if self._last_end is not None:
            elapsed = (now - self._last_end) / len(steps)
            beside = max(elapsed - float(max(step.seconds.max() for step in steps)), 0.0)
            keep = _OVERHEAD_MEMORY if self._overhead else 0.0
            self._overhead = keep * self._overhead + (1 - keep) * beside
        self._last_end = now

    def _decide(self) -> None:
        estimate = self._noise.value
        if estimate is None or self._step_seconds(self.current) is None:
            return
        chosen = choose_global_batch(
            lambda size: float(self._step_seconds(size) or 0.0) + self._overhead,
            self.base,
            self.largest,
            estimate,
            present=self.current,
        )
        chosen = min(max(chosen, self.current), 2 * self.current)
        rate = functools.partial(
            rate_factor_of_batch,
            base_batch_size=self.base,
            estimate=estimate,
            adaptive_optimizer=self._is_adaptive,
        )
        factor = rate(chosen) / rate(self.current)
        self._strategy.compute_times.control.send_batch(chosen, factor)

    def epoch_begins(self) -> int | None:
        """Adopt the data's current size, which another callback may have restored from a backup."""
        batch = int(self._data.global_batch_size)
        if batch == self.current:
            return None
        self.current = batch
        return batch

    def steps_end(self) -> None:
        """Mark the end of steps: like validation, the time until the next reading is not a step."""
        self._last_end = None

    def epoch_ends(self) -> int | None:
        """Apply the chief's latest wish; between two epochs, on every worker."""
        self.steps_end()
        batch, factor = self._wanted
        if batch <= self.current:
            return None
        _logger.info(
            "Global batch %d -> %d (noise scale %.0f samples), learning rate times %.3g.",
            self.current,
            batch,
            self.noise_scale or 0.0,
            factor,
        )
        self.current = batch
        self._data.set_global_batch_size(batch)
        optimizer = _innermost(self._model.optimizer)
        rate = float(keras.ops.convert_to_numpy(optimizer.learning_rate))
        optimizer.learning_rate = rate * factor
        self._shorter_epochs.expect()  # Keras assumes the first epoch's steps for all
        return batch

    def training_ends(self) -> None:
        """Restore Keras's warnings."""
        self._shorter_epochs.end()


def _check(
    strategy: TrainingStrategy, model: keras.Model, data: tf.distribute.DistributedDataset
) -> None:
    if strategy.num_replicas_in_sync < 2:
        raise ValueError(
            'global_batch="adaptive" compares the gradients of replicas, and needs two at least. '
            f"Received: {strategy.num_replicas_in_sync}. Leave it out."
        )
    size = getattr(data, "global_batch_size", None)
    if size is None or data.cardinality == -1:
        raise ValueError(
            'global_batch="adaptive" changes batches between epochs. It needs a tf.data.Dataset '
            f"that ends (without repeat()) and whose last batch() is known. Received: {data} with "
            f"batch size {size} and cardinality {int(getattr(data, 'cardinality', -2))}."
        )
    data.set_global_batch_size(int(size))  # fails here if the pipeline cannot change
    optimizer = _innermost(model.optimizer)
    if isinstance(optimizer.get_config()["learning_rate"], dict):  # a serialized schedule
        raise ValueError(
            'global_batch="adaptive" multiplies the learning rate. Received: an optimizer whose '
            "rate follows a LearningRateSchedule of steps. Give it a number, and use "
            "keras.callbacks.LearningRateScheduler or ReduceLROnPlateau for the rest."
        )


def _innermost(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    return optimizer


def _check_cluster(strategy: TrainingStrategy) -> None:
    if strategy.num_async_workers:
        raise ValueError(
            "Async workers take global batches by their number, which must mean the same samples "
            "everywhere. Received: an adaptive global batch in a cluster with "
            f"{strategy.num_async_workers} async workers. Leave global_batch='constant'."
        )
