"""Elastic averaging without a lock on the center."""

from __future__ import annotations

from typing import ClassVar

from keras_het.asynchronous.rules.elastic_averaging import ElasticAveraging


class HogwildEASGD(ElasticAveraging):
    r"""Async EASGD, but simultaneous pushes do not wait for each other.

    A push may read a center of which another has changed a half, and versions may count too few: a
    worker's staleness is a lower bound.

    Args:
        alpha: moving rate; None for 0.9 / `num_workers`, and 0.5 for one worker.
        learning_rate: of the workers, to check the bound.
        num_workers: number of workers; needed for the default of alpha.

    Raises:
        ValueError: if alpha is outside the bound, as `ElasticAveraging` has it.

    Reference:
        You, Buluc and Demmel, "Scaling Deep Learning on GPU and Knights Landing clusters", SC 2017;
        Recht et al., "Hogwild!", NeurIPS 2011.
    """

    name: ClassVar[str] = "hogwild_easgd"
    is_atomic: ClassVar[bool] = False
