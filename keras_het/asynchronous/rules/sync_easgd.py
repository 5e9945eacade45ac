"""Elastic averaging of all workers at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from keras_het.asynchronous.rules.elastic_averaging import (
    check_moving_rate,
    check_with_optimizer,
    default_moving_rate,
)
from keras_het.asynchronous.rules.synchronous_rule import AllReduceSum, State, SynchronousRule

if TYPE_CHECKING:
    import keras
    import tensorflow as tf


class SyncEASGD(SynchronousRule):
    r"""Deterministic EASGD: workers and center pull each other at the same time.

    .. math::
        x_i \leftarrow x_i - \eta\, g_i(x_i) - \alpha (x_i - c), \qquad
        c \leftarrow c + \alpha \sum_j (x_j - c)

    where both right-hand sides use the old values. An overlapped exchange (period 1, overlap 1: the
    authors' Sync EASGD3) is exactly this: the gradient is computed at the weights that were sent,
    while they travel. Without overlap the exchange follows the step. The summed quantity is
    :math:`x_j - c`, one packed vector; the sum uses the all-reduce's tree or ring instead of taking
    turns.

    Args:
        num_workers: n.
        alpha: moving rate; None for 0.9 / n, as the authors do.
        learning_rate: learning rate of the workers (times the largest curvature if known), to check
            the bound; None for the bound of an infinitesimal rate.
        period: local steps from one exchange to the next.
        overlap: number of steps taken while an exchange is in flight.

    Raises:
        ValueError: if alpha is outside the stability bound on a quadratic,
            0 < alpha <= (4 - 2 eta) / (2 + n (2 - eta)), see `largest_moving_rate`, where eta is
            the rate of all steps of an overlap together, see `overlapped_rate`; or if a number is
            out of range.

    Reference:
        You, Buluc and Demmel, "Scaling Deep Learning on GPU and Knights Landing clusters", SC 2017,
        equations 1 and 2 and Sync EASGD 1 to 3.
    """

    name: ClassVar[str] = "sync_easgd"
    settings = ("num_workers", "alpha", "learning_rate", "period", "overlap")
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

    def initial_state(self, weights: tf.Tensor) -> State:
        return {"center": weights}

    def combine(
        self,
        weights: tf.Tensor,
        state: State,
        samples: float | tf.Tensor,
        all_reduce_sum: AllReduceSum,
    ) -> tuple[tf.Tensor, State]:
        center = state["center"]
        difference = weights - center
        moved = center + self.alpha * all_reduce_sum(difference)
        return weights - self.alpha * difference, {"center": moved}

    def check_optimizer(self, optimizer: keras.optimizers.Optimizer) -> None:
        check_with_optimizer(optimizer, self.alpha, self.num_workers, self.overlap)
