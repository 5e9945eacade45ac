"""Elastic averaging, first come first served."""

from __future__ import annotations

from typing import ClassVar

from keras_het.asynchronous.rules.elastic_averaging import ElasticAveraging


class AsyncEASGD(ElasticAveraging):
    r"""Elastic averaging of workers that descend the plain gradient, in the order they come.

    .. math::
        x_i \leftarrow x_i - \eta\, g_i(x_i) - \alpha (x_i - c), \qquad
        c \leftarrow c + \alpha (x_i - c)

    The worker computes its gradient while its weights and the center travel.

    Args:
        alpha: moving rate; None for 0.9 / `num_workers`, and 0.5 for one worker.
        learning_rate: of the workers, to check the bound.
        num_workers: number of workers; needed for the default of alpha.

    Raises:
        ValueError: if alpha is outside the bound, as `ElasticAveraging` has it.

    Reference:
        You, Buluc and Demmel, "Scaling Deep Learning on GPU and Knights Landing clusters", SC 2017,
        equations 1 and 2.
    """

    name: ClassVar[str] = "async_easgd"
