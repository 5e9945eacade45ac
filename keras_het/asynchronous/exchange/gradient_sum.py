"""Gradients summed between two exchanges, for rules that send them."""

from __future__ import annotations

import keras
import tensorflow as tf

from keras_het.asynchronous.exchange.model_vectors import VariableVectors
from keras_het.training_strategy import TrainingStrategy

_RATE = 1.0


class GradientSum(keras.optimizers.Optimizer):
    r"""An optimizer that accumulates gradients and leaves the weights unchanged.

    .. math:: s \leftarrow s + g

    so that any number of steps forms one large batch, whose mean gradient the service applies at
    its own rate. The rate here has no effect: `MeanGradient.check_rate` refuses another.
    """

    def __init__(self) -> None:
        super().__init__(learning_rate=_RATE, name="gradient_sum")
        self.sums: list[keras.Variable] = []

    def build(self, variables: list[keras.Variable]) -> None:
        """Create a sum for each variable."""
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
        """Add the gradient of one step."""
        del learning_rate
        total = self.sums[self._get_variable_index(variable)]
        self.assign_add(total, keras.ops.cast(gradient, total.dtype))


class MeanGradient:
    """The mean gradient of the steps since the last exchange, as vectors for the wire."""

    def __init__(
        self,
        variables: list[keras.Variable],
        strategy: TrainingStrategy,
        partition_size: int,
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
        self._vectors = VariableVectors(self._sum.sums, strategy, partition_size)
        self._taken = 0

    def take(self) -> list[tf.Tensor]:
        """Return the mean, float32 vectors like those of the weights, and start a new one."""
        steps = self._steps() - self._taken
        means = [total / max(steps, 1) for total in self._vectors.read()]
        self.forget()
        return means

    def forget(self) -> None:
        """Restart the sum."""
        self._vectors.write([total * 0.0 for total in self._vectors.read()])
        self._taken = self._steps()

    def check_rate(self, rule: str) -> None:
        """Refuse a learning rate set by a callback, which would have no effect.

        This waits for the step in progress, so do not call it for every step.
        """
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
