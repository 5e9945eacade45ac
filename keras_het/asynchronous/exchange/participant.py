"""Common base of the sync group and an async worker."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_het.asynchronous.exchange.gradient_sum import MeanGradient
from keras_het.asynchronous.exchange.model_vectors import ModelVectors
from keras_het.asynchronous.parameter_service import FloatWire, TopKWire, Wire, credential
from keras_het.asynchronous.parameter_service.sample_ledger import LARGEST_EPOCH, TrainingFacts
from keras_het.asynchronous.rules import ElasticAveraging, UpdateRule
from keras_het.loader.input.data_pass import Claims
from keras_het.rpc.admission import read_secret
from keras_het.rpc.partitions import LARGEST_MESSAGE_BYTES
from keras_het.strategy.cluster.cluster_config import config_of
from keras_het.training_strategy import TrainingStrategy


class StatisticsAveraging(ElasticAveraging):
    """Elastic averaging that keeps a worker's statistics between its own and the center's.

    A worker that took steps while the answer traveled moves by the difference at the time of
    sending, so that everything it has learned in the meantime is kept. That difference may exceed
    the rest of a variance that has fallen since: hence the bound. To the service, which keeps the
    center, this is elastic averaging under the same name.
    """

    def receive(self, weights: tf.Tensor, sent_weights: tf.Tensor, answer: tf.Tensor) -> tf.Tensor:
        """Move the worker's statistics towards the center as it moved, but not beyond it."""
        if self.alpha == 1:  # only this worker moves the center, which equals its message
            return weights
        pulled = super().receive(weights, sent_weights, answer)
        return tf.clip_by_value(pulled, tf.minimum(weights, answer), tf.maximum(weights, answer))


WEIGHTS_PREFIX, STATE_PREFIX = "weights_", "state_"


@dataclasses.dataclass(frozen=True)
class HybridOptions:
    """Options for training a sync group and async workers together."""

    rule: UpdateRule
    period: int = 8
    adapts_period: bool = False
    async_batch_size: int | None = None
    staleness_bound: int | None = None
    timeout_seconds: float = 10.0
    connect_seconds: float = 300.0
    end_seconds: float = 60.0
    goes_on_without_service: bool = False
    wire: Wire | None = None
    spreads_service: bool = False
    partition_bytes: int = LARGEST_MESSAGE_BYTES
    num_epochs: int = LARGEST_EPOCH

    @property
    def waits_for_answer(self) -> bool:
        """Whether a worker needs the answer to its message to continue."""
        return self.rule.uses_gradients or self.rule.may_wait

    def wire_of(self, worker: int) -> Wire:
        """Return the format of an async worker's weights: the rule may send only some of them."""
        ratio = None if self.wire else self.rule.compression_ratio(worker)
        return self.weights_wire if ratio is None else TopKWire(ratio)

    @property
    def sends_planned_part(self) -> bool:
        """Whether the fraction of the values that a worker sends is measured."""
        ratio = None if self.wire else self.rule.compression_ratio(0)
        return self.rule.is_measured and ratio is not None

    def period_of(self, worker: int, stage: int) -> int:
        """Return the steps of an async worker between two exchanges."""
        return self.rule.local_steps(worker, stage) or self.period

    @property
    def presence_seconds(self) -> float:
        """Silence in seconds after which an async worker counts as gone."""
        return 2 * self.timeout_seconds

    @property
    def weights_wire(self) -> Wire:
        """Format of the weights, as announced to the service."""
        if self.wire is None and self.rule.compression_ratio(0) is not None:
            return TopKWire(1.0)
        return self.wire or FloatWire()

    @property
    def partition_size(self) -> int:
        """Largest number of elements of a partition; places travel with the largest values."""
        return min(self.partition_bytes // 4, self.weights_wire.largest_partition)


class Participant(abc.ABC):
    """One side of a hybrid training, driven by `keras_het.callbacks.HybridAggregation`."""

    shows_paces = False
    paces: np.ndarray | None = None

    def __init__(
        self, model: keras.Model, strategy: TrainingStrategy, options: HybridOptions
    ) -> None:
        self.model, self.strategy, self.options = model, strategy, options
        self.rule = options.rule
        self.vectors = ModelVectors(model, strategy, options.partition_size)
        strategy._training_state.num_hybrid_runs += 1
        self.run: int = strategy._training_state.num_hybrid_runs
        self.secret = read_secret()
        self.credential = credential(self.secret, self.service_fingerprint)
        self.num_participants = first_async_participant(strategy) + strategy.num_async_workers
        self.state_rule = StatisticsAveraging(alpha=1.0 / self.num_participants)
        self.data = data = strategy._data_to_be_trained
        self.num_batches = int(data.cardinality)
        self.fingerprint = int(data.fingerprint or 0)
        self.first_pass = len(data.position[0])
        self._own: list[tf.Tensor] | None = None
        self._mean_gradient: MeanGradient | None = None
        check_can_be_shared(data)

    @property
    def service_fingerprint(self) -> str:
        """Fingerprint of model, rule, format and message size, on which all tasks must agree."""
        options = self.options
        form = f"{options.weights_wire.name} {options.partition_size}"
        return f"{self.vectors.fingerprint(self.rule)} {form}"

    def sum_gradients(self) -> keras.optimizers.Optimizer:
        """Return an optimizer that sums gradients; from now on this task sends these sums."""
        variables, size = self.model.trainable_variables, self.options.partition_size
        own = self.model.optimizer
        self._mean_gradient = MeanGradient(variables, self.strategy, size, own)
        return self._mean_gradient.optimizer

    def forget_gradients(self) -> None:
        """Restart the sums, because a backup may have restored half a gradient."""
        if self._mean_gradient is not None:
            self._mean_gradient.forget()

    def check_rate(self) -> None:
        """Refuse a learning rate set by a callback if the service takes the steps."""
        if self._mean_gradient is not None:
            self._mean_gradient.check_rate(self.rule.name)

    def progress(self) -> list[tf.Tensor]:
        """Return this task's progress: its weights, or the mean gradient since its last message."""
        if self._mean_gradient is None:
            return self.vectors.weights.read()
        return self._mean_gradient.take()

    @property
    def facts(self) -> TrainingFacts:
        """Return the facts about this participant's training."""
        return TrainingFacts(
            self.num_batches,
            self.fingerprint,
            self.first_pass,
            self.run,
            self.options.num_epochs,
        )

    def passes_before(self, epoch: int) -> tuple[bool, ...]:
        """Return, for each pass over the data before an epoch, whether it was iterated.

        Keras creates two iterators for each epoch and uses the first. What workers did in earlier
        passes does not count: a worker may have received no batch of them.
        """
        return (True,) * self.first_pass + (True, False) * epoch

    @abc.abstractmethod
    def start_epoch(self, epoch: int) -> None:
        """Prepare an epoch before its first step; start everything before the first epoch."""

    @abc.abstractmethod
    def claims(self) -> Claims | None:
        """Return the `Claims` of the pass that starts now."""

    @abc.abstractmethod
    def steps_done(self, steps: int, samples: int) -> None:
        """Record completed training steps; exchange if it is due."""

    @abc.abstractmethod
    def meet_center(self) -> list[tf.Tensor]:
        """Exchange and wait for the answer; return the center's partitions."""

    @abc.abstractmethod
    def end(self) -> None:
        """End training; the model then has the center's weights."""

    @abc.abstractmethod
    def leave(self) -> None:
        """Stop the background work of training, including after an error."""

    def show_center(self) -> None:
        """Load the center's weights into the model, for evaluation or saving; idempotent."""
        if self._own is not None:
            return
        center = self.meet_center()
        self._own = self.vectors.weights.read()
        self.vectors.weights.write(center)

    def hide_center(self) -> None:
        """Restore the model's own weights."""
        own, self._own = self._own, None
        if own is not None:
            self.vectors.weights.write(own)


def first_async_participant(strategy: TrainingStrategy) -> int:
    """Number of the first async worker among the participants; a sync group has number 0."""
    return int(config_of(strategy).has_sync_group)


def check_can_be_shared(data: Any) -> None:
    """Refuse data whose epochs the tasks could not share."""
    num_batches = int(data.cardinality)
    if data.takes_keras_arrays:
        raise ValueError(
            "Async workers take batches of one order of samples, of which a worker that comes late "
            "must find the present epoch. Received: arrays that are not all dense, or that this "
            "version of Keras shuffles in a way that is not known, whose order Keras draws. Give "
            "fit a tf.data.Dataset with a known number of batches."
        )
    if num_batches <= 0:
        raise ValueError(
            "Async workers share each epoch with the sync group, so its number of batches must be "
            f"known. Received: {data} with cardinality {num_batches}. Leave repeat() and "
            "steps_per_epoch out, and state a number that tf.data cannot know by "
            "dataset.apply(tf.data.experimental.assert_cardinality(n))."
        )
