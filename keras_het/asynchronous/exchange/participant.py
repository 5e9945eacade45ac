"""What the sync group and an async worker have in common: options, vectors and gradients."""

from __future__ import annotations

import abc
import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from keras_het.asynchronous.exchange.pace import PushPace, choose_period
from keras_het.asynchronous.parameter_service.sample_ledger import LARGEST_EPOCH, TrainingFacts
from keras_het.asynchronous.parameter_service.wire import (
    PARTITION_BYTES,
    FloatWire,
    Partitions,
    Wire,
)
from keras_het.exchange.message import Vector
from keras_het.exchange.secret import credential, model_fingerprint, read_secret
from keras_het.loader.input.data_pass import Claims
from keras_het.packed_variables import PackedVariables, shared_variables
from keras_het.planning.roles.exchange_settings import longest_period
from keras_het.rules import ElasticAveraging, UpdateRule, serialize
from keras_het.strategy.cluster.cluster_config import config_of
from keras_het.strategy.measure.emulated_device import until_computed

if TYPE_CHECKING:
    import keras

    from keras_het.strategy.heterogeneous_strategy import HeterogeneousStrategy


class PartitionedVector:
    """Variables, read and written as the partitions of one vector, a list of float32 vectors."""

    # Rounding of 16-bit variables is kept apart: workers would send and repeat it as a change.

    def __init__(
        self,
        variables: Sequence[keras.Variable],
        strategy: HeterogeneousStrategy,
        partition_bytes: int,
    ) -> None:
        shapes = tuple(tuple(variable.shape) for variable in variables)
        self.partitions = Partitions(shapes, partition_bytes)
        self._variables = PackedVariables(variables, strategy)
        self._rounds = any(tf.as_dtype(variable.dtype).size < 4 for variable in variables)
        self._rest: Vector | None = None

    def read(self) -> list[Vector]:
        held = self._read()
        return self.partitions.cut(held if self._rest is None else held + self._rest)

    def write(self, parts: Sequence[Vector]) -> None:
        vector = np.concatenate(parts)
        self._variables.write(vector)
        if self._rounds:
            with np.errstate(invalid="ignore"):
                rest = vector - self._read()
            self._rest = np.where(np.isfinite(rest), rest, np.float32(0.0))

    def _read(self) -> Vector:
        # The memory of the tensor itself, which nothing changes.
        return np.frombuffer(memoryview(self._variables.read()), np.float32)


class StatisticsAveraging(ElasticAveraging):
    """Elastic averaging that keeps a worker's statistics between its own and the center's."""

    # A variance may have fallen by more than the pull while the answer traveled: hence the bound.
    # To the service this is elastic averaging, under the same name.

    def receive(self, weights: Vector, sent_weights: Vector, answer: Vector) -> Vector:
        if self.alpha == 1:  # only this worker moves the center, which equals its message
            return weights
        pulled = super().receive(weights, sent_weights, answer)
        return np.clip(pulled, np.minimum(weights, answer), np.maximum(weights, answer))


_RATE = 1.0


@dataclasses.dataclass(frozen=True)
class HybridOptions:
    """Options for training a sync group and async workers together."""

    rule: UpdateRule
    period: int = 8
    adapts_period: bool = False
    async_batch_size: int | None = None
    max_staleness: int | None = None
    timeout_seconds: float = 10.0
    startup_timeout_seconds: float = 300.0
    shutdown_timeout_seconds: float = 60.0
    goes_on_without_service: bool = False
    wire: Wire = dataclasses.field(default_factory=FloatWire)
    spreads_service: bool = False
    partition_bytes: int = PARTITION_BYTES
    num_epochs: int = LARGEST_EPOCH

    @property
    def waits_for_answer(self) -> bool:
        """Whether a worker needs the answer to its message to continue."""
        return self.rule.uses_gradients or self.rule.may_wait

    @property
    def presence_seconds(self) -> float:
        """Silence in seconds after which an async worker counts as gone."""
        return 2 * self.timeout_seconds


class ModelVectors:
    """The parts of a model that are shared with the parameter service."""

    # The rule combines trainable weights; moving statistics (other float state) are averaged.

    def __init__(
        self, model: keras.Model, strategy: HeterogeneousStrategy, partition_bytes: int
    ) -> None:
        weights, state = shared_variables(model)
        self.weights = PartitionedVector(weights, strategy, partition_bytes)
        self.state = PartitionedVector(state, strategy, partition_bytes) if state else None
        self.num_weights = len(self.weights.partitions.sizes)
        own = () if self.state is None else self.state.partitions.sizes
        self.sizes = (*self.weights.partitions.sizes, *own)
        self._described = [*weights, *state]

    def read(self, weights: list[Vector] | None = None) -> list[Vector]:
        """Return all parts; those of the weights may be given."""
        own = self.weights.read() if weights is None else weights
        return own if self.state is None else [*own, *self.state.read()]

    def write(self, parts: Sequence[Vector]) -> None:
        self.weights.write(parts[: self.num_weights])
        if self.state is not None:
            self.state.write(parts[self.num_weights :])

    def fingerprint(self, rule: UpdateRule) -> str:
        """Hash what all participants must agree on: variables, and rule with settings."""
        settings = json.dumps(serialize(rule), sort_keys=True, default=str)
        return model_fingerprint(
            [variable.path for variable in self._described],
            [tuple(variable.shape) for variable in self._described],
            [str(variable.dtype) for variable in self._described],
            f"{rule.name} {settings}",
        )


class GradientSum(keras.optimizers.Optimizer):
    r"""An optimizer that sums gradients, :math:`s \leftarrow s + g`, and leaves the weights."""

    # Any number of steps forms one large batch, for which the service has its own rate.

    def __init__(self) -> None:
        super().__init__(learning_rate=_RATE, name="gradient_sum")
        self.sums: list[keras.Variable] = []

    def build(self, variables: list[keras.Variable]) -> None:
        if self.built:
            return
        super().build(variables)
        self.sums = self.add_optimizer_variables(variables, "sum")

    def update_step(
        self,
        gradient: tf.Tensor | tf.IndexedSlices,
        variable: keras.Variable,
        learning_rate: object,
    ) -> None:
        total = self.sums[self._get_variable_index(variable)]
        self.assign_add(total, keras.ops.cast(gradient, total.dtype))


class MeanGradient:
    """The mean gradient of the steps since the last exchange, as vectors for the wire."""

    def __init__(
        self,
        variables: list[keras.Variable],
        strategy: HeterogeneousStrategy,
        partition_bytes: int,
        user_optimizer: keras.optimizers.Optimizer | None = None,
    ) -> None:
        with strategy.scope():
            self._sum = GradientSum()
            self.optimizer: keras.optimizers.Optimizer = self._sum
            if isinstance(user_optimizer, keras.optimizers.LossScaleOptimizer):
                self.optimizer = keras.optimizers.LossScaleOptimizer(
                    self._sum, user_optimizer.initial_scale, user_optimizer.dynamic_growth_steps
                )
            self.optimizer.build(variables)
        self._leave_files_to(user_optimizer)
        self._vectors = PartitionedVector(self._sum.sums, strategy, partition_bytes)
        self._taken = 0

    def take(self) -> list[Vector]:
        """Return the mean, float32 vectors shaped like the weights, and start a new one."""
        steps = self._steps() - self._taken
        means = [total / max(steps, 1) for total in self._vectors.read()]
        self.forget()
        return means

    def forget(self) -> None:
        sizes = self._vectors.partitions.sizes
        self._vectors.write([np.zeros(size, np.float32) for size in sizes])
        self._taken = self._steps()

    def check_rate(self, rule: str) -> None:
        """Refuse a rate set by a callback, which would have no effect; waits for the devices."""
        rate = float(keras.ops.convert_to_numpy(self._sum.learning_rate))
        if rate != _RATE:
            raise ValueError(
                f"With the rule {rule!r} the service takes the optimizer's steps, at the rule's "
                "learning rate; the model's optimizer only sums gradients up, at the rate "
                f"{_RATE:g}. Received: {rate:g}, which a callback such as LearningRateScheduler or "
                "ReduceLROnPlateau has set. Leave that out, and give the rule its rate "
                '(learning_rate=...), or "async_sgd" a schedule: AsyncSGD(optimizer=keras.'
                "optimizers.SGD(schedule)), which counts updates of the center."
            )

    def _leave_files_to(self, user_optimizer: keras.optimizers.Optimizer | None) -> None:
        """Store the state of the user's optimizer in files, because they are loaded with it."""
        if user_optimizer is None:
            return
        pairs = [(self.optimizer, user_optimizer)]
        if self.optimizer is not self._sum:
            pairs.append((self._sum, user_optimizer.inner_optimizer))
        for own, other in pairs:  # Keras would treat an optimizer attribute as a part
            own.save_own_variables = other.save_own_variables
            own.load_own_variables = other.load_own_variables

    def _steps(self) -> int:
        return int(self._sum.iterations.numpy())


class Participant(abc.ABC):
    """One side of a hybrid training, driven by `keras_het.callbacks.AsyncWorkers`."""

    shows_paces = False
    paces: np.ndarray | None = None

    def __init__(
        self, model: keras.Model, strategy: HeterogeneousStrategy, options: HybridOptions
    ) -> None:
        self.model, self.strategy, self.options = model, strategy, options
        self.rule = options.rule
        self.vectors = ModelVectors(model, strategy, options.partition_bytes)
        strategy.extended.training_state.num_hybrid_runs += 1
        self.run: int = strategy.extended.training_state.num_hybrid_runs
        self.secret = read_secret()
        self.credential = credential(self.secret, self.service_fingerprint)
        self.num_participants = first_async_participant(strategy) + strategy.num_async_workers
        self.state_rule = StatisticsAveraging(alpha=1.0 / self.num_participants)
        data: Any = strategy.extended.data_path.to_be_trained()
        self.data = data
        self.num_batches = int(data.cardinality)
        self.fingerprint = int(data.fingerprint or 0)
        self.first_pass = len(data.position[0])
        self._pace = PushPace(
            waits=options.waits_for_answer, wait_for_devices=self.wait_for_devices
        )
        self._steps = self._samples = 0  # since the last exchange
        self._claims: Claims | None = None
        self._own: list[Vector] | None = None
        self._mean_gradient: MeanGradient | None = None
        check_can_be_shared(data)

    @property
    def service_fingerprint(self) -> str:
        """Fingerprint of model, rule, format and message size, on which all tasks must agree."""
        options = self.options
        form = f"{options.wire.name} {options.partition_bytes}"
        return f"{self.vectors.fingerprint(self.rule)} {form}"

    def sum_gradients(self) -> keras.optimizers.Optimizer:
        """Return an optimizer that sums gradients; from now on this task sends these sums."""
        variables, size = self.model.trainable_variables, self.options.partition_bytes
        own = self.model.optimizer
        self._mean_gradient = MeanGradient(variables, self.strategy, size, own)
        return self._mean_gradient.optimizer

    def forget_gradients(self) -> None:
        """Restart the sums, because a backup may have restored half a gradient."""
        if self._mean_gradient is not None:
            self._mean_gradient.forget()

    def check_rate(self) -> None:
        if self._mean_gradient is not None:
            self._mean_gradient.check_rate(self.rule.name)

    def progress(self) -> list[Vector]:
        """Return this task's progress: its weights, or the mean gradient since its last message."""
        if self._mean_gradient is None:
            return self.vectors.weights.read()
        return self._mean_gradient.take()

    @property
    def facts(self) -> TrainingFacts:
        return TrainingFacts(
            self.num_batches,
            self.fingerprint,
            self.first_pass,
            self.run,
            self.options.num_epochs,
        )

    @property
    def wait_for_devices(self) -> Callable[[], None] | None:
        """A function that waits for all steps that devices have yet to compute, if they may."""
        return self._read_a_weight if self.strategy.extended.works_ahead else None

    def _read_a_weight(self) -> None:
        until_computed()()
        value = self.model.trainable_variables[0].value
        tf.reshape(self.strategy.experimental_local_results(value)[0], [-1])[:1].numpy()

    def period_for(self, paces: np.ndarray, silence: np.ndarray, number: int, steps: int) -> int:
        """Return the period of a participant with some steps in an epoch, by all paces."""
        least = self.rule.least_period
        limits = self.options.presence_seconds, longest_period(steps, least)
        return choose_period(paces, silence, number, limits, least)

    def passes_before(self, epoch: int) -> tuple[bool, ...]:
        """Return, for each pass over the data before an epoch, whether it was iterated."""
        # Keras creates two iterators for each epoch and uses the first.
        return (True,) * self.first_pass + (True, False) * epoch

    @abc.abstractmethod
    def start_epoch(self, epoch: int) -> None:
        """Prepare an epoch before its first step; start everything before the first epoch."""

    def claims(self) -> Claims | None:
        """Return the `Claims` of the pass that starts now."""
        return self._claims

    @abc.abstractmethod
    def steps_done(self, steps: int, samples: int) -> None:
        """Record completed training steps; exchange if it is due."""

    @abc.abstractmethod
    def meet_center(self) -> list[Vector]:
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
        own, self._own = self._own, None
        if own is not None:
            self.vectors.weights.write(own)


def first_async_participant(strategy: HeterogeneousStrategy) -> int:
    """Number of the first async worker among the participants; a sync group has number 0."""
    return int(config_of(strategy).has_sync_group)


def check_can_be_shared(data: Any) -> None:
    num_batches = int(data.cardinality)
    if data.takes_keras_arrays:
        raise ValueError(
            "Async workers take batches of one order of samples, in which a worker that joins late "
            "must find the current epoch. Received: arrays that are not all dense, or that this "
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
