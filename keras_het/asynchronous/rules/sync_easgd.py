"""Elastic averaging of all workers at once."""

from __future__ import annotations

from typing import Any, ClassVar

from keras_het.asynchronous.rules.elastic_averaging import (
    check_moving_rate,
    default_moving_rate,
    plain_learning_rate,
)
from keras_het.asynchronous.rules.synchronous_rule import AllReduceSum, State, SynchronousRule


class SyncEASGD(SynchronousRule):
    r"""Workers and center pull each other at the same time: deterministic EASGD.

    .. math::
        x_i \leftarrow x_i - \eta\, g_i(x_i) - \alpha (x_i - c), \qquad
        c \leftarrow c + \alpha \sum_j (x_j - c)

    where both right sides have the old values. An overlapped exchange (period 1, overlap 1: the
    authors' Sync EASGD3) is exactly this: the gradient is computed at the weights that were sent,
    while they travel. Without overlap the exchange follows the step. What is summed is
    :math:`x_j - c`, one packed vector; the sum goes by whatever tree or ring the all-reduce uses
    instead of in turns.

    Args:
        num_workers: n.
        alpha: moving rate; None for 0.9 / n, as the authors.
        learning_rate: of the workers (times the largest curvature if that is known), to check the
            bound; None for the bound of an infinitely small rate.
        period: local steps from one exchange to the next.
        overlap: steps taken while an exchange is on its way.

    Raises:
        ValueError: if alpha is outside the stability bound on a quadratic,
            0 < alpha <= (4 - 2 eta) / (2 + n (2 - eta)), see `largest_moving_rate`, where eta is
            that of all steps of an overlap together, see `overlapped_rate`; or a number is out of
            its range.

    Reference:
        You, Buluc and Demmel, "Scaling Deep Learning on GPU and Knights Landing clusters", SC 2017,
        equations 1 and 2 and Sync EASGD 1 to 3.
    """

    name: ClassVar[str] = "sync_easgd"
    center_is_weights: ClassVar[bool] = False

    def __init__(
        self,
        num_workers: int,
        alpha: float | None = None,
        learning_rate: float | None = None,
        period: int = 1,
        overlap: int = 0,
    ) -> None:
        super().__init__(period, overlap)
        self.num_workers = num_workers
        self.alpha = default_moving_rate(alpha, num_workers)
        self.learning_rate = learning_rate
        check_moving_rate(self.alpha, learning_rate, num_workers, overlap)

    def initial_state(self, weights: Any) -> State:
        """The center."""
        return {"center": weights}

    def combine(
        self, weights: Any, state: State, samples: Any, all_reduce_sum: AllReduceSum
    ) -> tuple[Any, State]:
        """Moves weights and center by their elastic differences; samples do not matter."""
        del samples
        center = state["center"]
        difference = weights - center
        moved = center + self.alpha * all_reduce_sum(difference)
        return weights - self.alpha * difference, {"center": moved}

    def check_optimizer(self, optimizer: Any) -> None:
        """Checks the bound for the rate of plain gradient descent."""
        rate = plain_learning_rate(optimizer)
        if rate is not None and 0 <= rate <= 2:
            check_moving_rate(self.alpha, rate, self.num_workers, self.overlap)

    def get_config(self) -> dict[str, Any]:
        """The settings."""
        return {
            "num_workers": self.num_workers,
            "alpha": self.alpha,
            "learning_rate": self.learning_rate,
            "period": self.period,
            "overlap": self.overlap,
        }
