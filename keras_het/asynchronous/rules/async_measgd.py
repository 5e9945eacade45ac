"""Elastic averaging of workers with momentum."""

from __future__ import annotations

from typing import Any, ClassVar

import keras

from keras_het.asynchronous.rules.elastic_averaging import ElasticAveraging, own_optimizer


class AsyncMEASGD(ElasticAveraging):
    r"""Async EASGD of workers that run gradient descent with momentum.

    .. math::
        v_i \leftarrow \mu v_i - \eta\, g_i(x_i), \qquad
        x_i \leftarrow x_i + v_i - \alpha (x_i - c), \qquad
        c \leftarrow c + \alpha (x_i - c)

    The center's side is that of Async EASGD; the first equation is `keras.optimizers.SGD` with
    momentum on the worker. With Nesterov's momentum it is the EAMSGD of 2015.

    Args:
        alpha: moving rate; None for 0.9 / `num_workers`, and 0.5 for one worker.
        learning_rate: of the workers, to check the bound.
        num_workers: number of workers; needed for the default of alpha.

    Raises:
        ValueError: if alpha is outside the bound, as `ElasticAveraging` has it.

    Reference:
        You, Buluc and Demmel, "Scaling Deep Learning on GPU and Knights Landing clusters", SC 2017,
        equations 5 and 6; Zhang, Choromanska and LeCun, NeurIPS 2015.
    """

    name: ClassVar[str] = "async_measgd"

    def check_optimizer(self, optimizer: Any) -> None:
        """Refuses all but gradient descent with momentum.

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
