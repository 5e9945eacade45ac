"""Gradients that are summed up between two exchanges, for rules that send them."""

from __future__ import annotations

from typing import Any

import keras

from keras_het.strategy.hybrid.model_vectors import VariableVectors


class GradientSum(keras.optimizers.Optimizer):
    r"""Adds gradients up, and leaves the weights where they are.

    .. math:: s \leftarrow s + \eta \, g

    so that any number of steps is one large batch, whose mean gradient the service applies. The
    rate :math:`\eta` is 1 unless a callback changes it.
    """

    def __init__(self) -> None:
        super().__init__(learning_rate=1.0, name="gradient_sum")
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
            learning_rate: a scalar.
        """
        total = self.sums[self._get_variable_index(variable)]
        rate = keras.ops.cast(learning_rate, total.dtype)
        self.assign_add(total, keras.ops.cast(gradient, total.dtype) * rate)


class MeanGradient:
    """The mean gradient of the steps since the last exchange, as vectors that travel.

    Args:
        variables: Keras variables that are trained.
        strategy: the strategy under which they were made.
        partition_size: float32 elements of a partition.
        user_optimizer: what the model was compiled with. If it scales the loss, so does this:
            float16 gradients would be rounded to zero. Steps that it skips do not count.

    Attributes:
        optimizer: what the model has meanwhile.
    """

    def __init__(
        self, variables: list[Any], strategy: Any, partition_size: int, user_optimizer: Any = None
    ) -> None:
        with strategy.scope():
            self._sum = GradientSum()
            self.optimizer: keras.optimizers.Optimizer = self._sum
            if isinstance(user_optimizer, keras.optimizers.LossScaleOptimizer):
                self.optimizer = keras.optimizers.LossScaleOptimizer(
                    self._sum, user_optimizer.initial_scale, user_optimizer.dynamic_growth_steps
                )
            self.optimizer.build(variables)
        self._vectors = VariableVectors(self._sum.sums, strategy, partition_size)
        self._taken = 0

    def take(self) -> list[Any]:
        """The mean, float32 vectors as those of the weights; what comes next is a new one."""
        steps = self._steps() - self._taken
        means = [total / max(steps, 1) for total in self._vectors.read()]
        self.forget()
        return means

    def forget(self) -> None:
        """Starts to sum up anew."""
        self._vectors.write([total * 0.0 for total in self._vectors.read()])
        self._taken = self._steps()

    def _steps(self) -> int:
        return int(self._sum.iterations.numpy())
