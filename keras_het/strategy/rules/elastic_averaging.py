"""Elastic averaging: workers and center pull each other like springs."""

from __future__ import annotations

from typing import Any

from keras_het.strategy.rules.update_rule import PushMeta


class ElasticAveraging:
    r"""The center's part of asynchronous EASGD and its kin.

    A worker sends its weights :math:`x_i`; with the center c before the push, both move by the same
    elastic difference:

    .. math:: c \leftarrow c + \alpha (x_i - c), \qquad x_i \leftarrow x_i - \alpha (x_i - c).

    The answer is the center before the push, so that the worker moves by the same difference
    (`pull_towards`). Between exchanges the worker takes steps of its own optimizer: plain gradient
    descent is Async EASGD, with momentum Async MEASGD. `is_atomic=False` is Hogwild EASGD: nothing
    is locked, simultaneous pushes may see each other's halves.

    Args:
        alpha: moving rate :math:`\alpha = \eta\rho`.
        learning_rate: of the workers, to check the bound; None to skip the check.
        is_atomic: whether pushes to a part wait for each other.

    Raises:
        ValueError: if alpha is outside the stability bound of round-robin EASGD on a quadratic,
            0 < alpha <= (4 - 2 eta) / (4 - eta).

    Reference:
        Zhang, Choromanska and LeCun, "Deep learning with Elastic Averaging SGD", NeurIPS 2015; You,
        Buluc and Demmel, "Scaling Deep Learning on GPU and Knights Landing clusters", SC 2017.
    """

    def __init__(
        self, alpha: float, learning_rate: float | None = None, is_atomic: bool = True
    ) -> None:
        bound = largest_moving_rate(0.0 if learning_rate is None else learning_rate)
        if not 0 < alpha <= bound:
            raise ValueError(
                f"alpha must be above 0 and at most (4 - 2 eta) / (4 - eta) = {bound:.4g} for eta "
                f"= {learning_rate}, else workers and center swing apart. Received: alpha={alpha}. "
                "The authors use 0.9 / number of workers."
            )
        self.alpha = alpha
        self._is_atomic = is_atomic

    @property
    def name(self) -> str:
        """Name of the rule."""
        return "elastic_averaging" if self._is_atomic else "hogwild_elastic_averaging"

    @property
    def is_atomic(self) -> bool:
        """Whether pushes to a part wait for each other."""
        return self._is_atomic

    def slots(self, size: int) -> dict[str, tuple[int, ...]]:
        """No state."""
        return {}

    def update(self, center: Any, slots: dict[str, Any], change: Any, meta: PushMeta) -> Any:
        """Moves the center towards the worker's weights `change`."""
        before = center.read_value()
        center.assign_add(self.alpha * (change - before))
        return before

    def pull_towards(self, weights: Any, answer: Any) -> Any:
        """The worker's weights after an exchange.

        Args:
            weights: what it sent.
            answer: what it got back.
        """
        return weights - self.alpha * (weights - answer)


def largest_moving_rate(learning_rate: float) -> float:
    """Stability bound of round-robin EASGD on a quadratic, for 0 <= learning_rate <= 2.

    Raises:
        ValueError: if the learning rate is outside of that range.
    """
    if not 0 <= learning_rate <= 2:
        raise ValueError(
            f"The bound is known for learning rates from 0 to 2. Received: {learning_rate}."
        )
    return (4 - 2 * learning_rate) / (4 - learning_rate)
