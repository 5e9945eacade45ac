"""Elastic averaging: workers and center pull each other like springs."""

from __future__ import annotations

from typing import ClassVar

import keras
import tensorflow as tf

from keras_het.asynchronous.rules.moving_rate import (
    LARGEST_DEFAULT,
    check_moving_rate,
    check_with_optimizer,
    default_moving_rate,
    own_optimizer,
)
from keras_het.asynchronous.rules.update_rule import PushMeta, Slots
from keras_het.asynchronous.rules.worker_sides import StepsItself


class ElasticAveraging(StepsItself):
    r"""Common base of asynchronous EASGD and its relatives.

    A worker sends its weights :math:`x_i`; with the center c before the push, both move by the same
    elastic difference:

    .. math:: c \leftarrow c + \alpha (x_i - c), \qquad x_i \leftarrow x_i - \alpha (x_i - c).

    The answer is the center before the push, so that the worker moves by the same difference even
    if it took steps in the meantime. Between exchanges it takes steps of its own optimizer.

    Args:
        alpha: moving rate :math:`\alpha = \eta\rho`; None for 0.9 / `num_workers`, as the authors
            do, and 0.5 for one worker.
        learning_rate: :math:`\eta` of the workers, times the largest curvature if known, to check
            the bound; None for the bound of an infinitesimal rate.
        num_workers: number of workers; needed for the default of alpha.

    Raises:
        ValueError: if alpha is outside the stability bound of round-robin EASGD on a quadratic, 0 <
            alpha <= (4 - 2 eta) / (4 - eta), or neither alpha nor `num_workers` is given.

    Reference:
        Zhang, Choromanska and LeCun, "Deep learning with Elastic Averaging SGD", NeurIPS 2015; You,
        Buluc and Demmel, "Scaling Deep Learning on GPU and Knights Landing clusters", SC 2017.
    """

    name: ClassVar[str] = "elastic_averaging"
    settings = ("alpha", "learning_rate", "num_workers")
    center_is_weights: ClassVar[bool] = False

    def __init__(
        self,
        alpha: float | None = None,
        learning_rate: float | None = None,
        num_workers: int | None = None,
    ) -> None:
        self.alpha = default_moving_rate(alpha, num_workers, LARGEST_DEFAULT)
        self.learning_rate = learning_rate
        self.num_workers = num_workers
        check_moving_rate(self.alpha, learning_rate, 1)

    def update(
        self, center: tf.Variable, slots: Slots, change: tf.Tensor, meta: PushMeta
    ) -> tf.Tensor:
        """Move the center towards the worker's weights `change`."""
        del slots, meta
        before = center.read_value()
        center.assign_add(self.alpha * (change - before))
        return before

    def message(self, weights: tf.Tensor, seen: tf.Tensor) -> tf.Tensor:
        """Return the weights."""
        del seen
        return weights

    def receive(self, weights: tf.Tensor, sent_weights: tf.Tensor, answer: tf.Tensor) -> tf.Tensor:
        """Pull the weights towards the center by the difference at the time of sending."""
        return weights - self.alpha * (sent_weights - answer)

    def check_optimizer(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Check the bound for the rate of plain gradient descent."""
        check_with_optimizer(optimizer, self.alpha, 1)

    def check_overlap(self, optimizer: keras.optimizers.Optimizer, steps: float) -> None:
        """Check the bound for answers that arrive after steps of plain gradient descent.

        Args:
            optimizer: the Keras optimizer that the model was compiled with.
            steps: number of steps while an answer travels; infinite if unknown.

        Raises:
            ValueError: if alpha is outside the bound; the message states the bound.
        """
        check_with_optimizer(optimizer, self.alpha, 1, steps)


class AsyncEASGD(ElasticAveraging):
    r"""Elastic averaging of workers that descend the plain gradient, in order of arrival.

    .. math::
        x_i \leftarrow x_i - \eta\, g_i(x_i) - \alpha (x_i - c), \qquad
        c \leftarrow c + \alpha (x_i - c)

    The worker computes its gradient while its weights and the center travel.

    Reference:
        You, Buluc and Demmel, "Scaling Deep Learning on GPU and Knights Landing clusters", SC 2017,
        equations 1 and 2.
    """

    name: ClassVar[str] = "async_easgd"


class HogwildEASGD(ElasticAveraging):
    r"""Async EASGD in which simultaneous pushes do not wait for each other.

    A push may read a center that another has changed halfway, and versions may count too few
    updates: a worker's staleness is a lower bound.

    Reference:
        You, Buluc and Demmel, "Scaling Deep Learning on GPU and Knights Landing clusters", SC 2017;
        Recht et al., "Hogwild!", NeurIPS 2011.
    """

    name: ClassVar[str] = "hogwild_easgd"
    is_atomic: ClassVar[bool] = False


class AsyncMEASGD(ElasticAveraging):
    r"""Async EASGD of workers that run gradient descent with momentum.

    .. math::
        v_i \leftarrow \mu v_i - \eta\, g_i(x_i), \qquad
        x_i \leftarrow x_i + v_i - \alpha (x_i - c), \qquad
        c \leftarrow c + \alpha (x_i - c)

    The center's side is that of Async EASGD; the first equation is `keras.optimizers.SGD` with
    momentum on the worker. With Nesterov's momentum it is the EAMSGD of 2015.

    Reference:
        You, Buluc and Demmel, "Scaling Deep Learning on GPU and Knights Landing clusters", SC 2017,
        equations 5 and 6; Zhang, Choromanska and LeCun, NeurIPS 2015.
    """

    name: ClassVar[str] = "async_measgd"

    def check_optimizer(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Refuse all optimizers but gradient descent with momentum.

        Raises:
            ValueError: for another optimizer.
        """
        optimizer = own_optimizer(optimizer)
        if isinstance(optimizer, keras.optimizers.SGD) and optimizer.momentum > 0:
            return
        raise ValueError(
            "AsyncMEASGD is elastic averaging of workers with momentum: compile the model with "
            "keras.optimizers.SGD(learning_rate, momentum=0.9). Received: "
            f"{type(optimizer).__name__}"
            f"(momentum={getattr(optimizer, 'momentum', None)}). Use AsyncEASGD for other "
            "optimizers."
        )
