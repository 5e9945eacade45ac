"""Gradients that are summed up between two exchanges, for rules that send them."""

from __future__ import annotations

from typing import Any

import keras

from keras_het.asynchronous.exchange.model_vectors import VariableVectors
from keras_het.training_strategy import TrainingStrategy

_RATE = 1.0


class GradientSum(keras.optimizers.Optimizer):
    r"""Adds gradients up, and leaves the weights where they are.

    .. math:: s \leftarrow s + g

    so that any number of steps is one large batch, whose mean gradient the service applies, at a
    rate of its own. The rate here counts for nothing: `MeanGradient.check_rate` refuses another.
    """

    def __init__(self) -> None:
        super().__init__(learning_rate=_RATE, name="gradient_sum")
        self.sums: list[Any] = []

    def build(self, variables: list[Any]) -> None:
        """Makes a sum for each variable.

        Args:
            variables: those that are trained.
        """
        if self.built:
            return
        super().build(variables)
        self.sums = self.add_optimizer_variables(variables, "sum")

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Adds the gradient of one step.

        Args:
            gradient: of `variable`, a dense tensor or `tf.IndexedSlices`.
            variable: which one; it stays as it is.
            learning_rate: not used.
        """
        del learning_rate
        total = self.sums[self._get_variable_index(variable)]
        self.assign_add(total, keras.ops.cast(gradient, total.dtype))


class MeanGradient:
    """The mean gradient of the steps since the last exchange, as vectors that travel.

    Args:
        variables: Keras variables that are trained.
        strategy: the strategy under which they were made.
        partition_size: float32 elements of a partition.
        user_optimizer: what the model was compiled with, whose state is what files have. If it
            scales the loss, so does this: float16 gradients would be rounded to zero. Steps that it
            skips do not count.

    Attributes:
        optimizer: what the model has meanwhile.
    """

    def __init__(
        self,
        variables: list[Any],
        strategy: TrainingStrategy,
        partition_size: int,
        user_optimizer: Any = None,
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

    def take(self) -> list[Any]:
        """The mean, float32 vectors as those of the weights; what comes next is a new one."""
        steps = self._steps() - self._taken
        means = [total / max(steps, 1) for total in self._vectors.read()]
        self.forget()
        return means

    def forget(self) -> None:
        """Starts to sum up again."""
        self._vectors.write([total * 0.0 for total in self._vectors.read()])
        self._taken = self._steps()

    def check_rate(self, rule: str) -> None:
        """Refuses a learning rate that a callback has set, which would move nothing.

        It waits for the step under way: not for every step.

        Args:
            rule: name of the rule by which the service takes the steps.

        Raises:
            ValueError: if it is not what it was at first.
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

    def _leave_files_to(self, user_optimizer: Any) -> None:
        """Files have the state of the user's optimizer, which is what they are loaded with."""
        if user_optimizer is None:
            return
        pairs = [(self.optimizer, user_optimizer)]
        if self.optimizer is not self._sum:
            pairs.append((self._sum, user_optimizer.inner_optimizer))
        for own, other in pairs:  # Keras would take an attribute that is an optimizer for a part
            own.save_own_variables = other.save_own_variables
            own.load_own_variables = other.load_own_variables

    def _steps(self) -> int:
        return int(self._sum.iterations.numpy())
