"""Splits that never change."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from keras_het.planning.balance.policy import SharePolicy
from keras_het.planning.bounded_shares import FloatArray, IntArray


class EvenPolicy(SharePolicy):
    """Every replica gets the same number of samples, as in plain data parallelism.

    The split of `tf.distribute.MirroredStrategy` and of PyTorch's DistributedDataParallel: a step
    takes as long as the slowest replica. The baseline for all other policies.

    Args:
        num_replicas: number of replicas, n.
        global_batch_size: samples that shares sum to.
        lower: smallest share of each replica, int [n]; by default 0.
        upper: largest share of each replica, int [n]; by default no bound.

    Reference:
        Chen et al., "Revisiting Distributed Synchronous SGD", 2016, arXiv:1604.00981.
    """

    name = "even"


class StaticPolicy(SharePolicy):
    """Shares in proportion to weights that never change.

    The open-loop split of Tyagi and Sharma: weights are known speeds, such as the number of cores
    or samples per second of a benchmark.

    Args:
        num_replicas: number of replicas, n.
        global_batch_size: samples that shares sum to.
        weights: one weight for each replica, zero or more, at least one positive; by default even.
        lower: smallest share of each replica, int [n]; by default 0.
        upper: largest share of each replica, int [n]; by default no bound.

    Raises:
        TypeError: if a bound is not whole.
        ValueError: if a weight is not valid, or no shares satisfy the bounds.

    Reference:
        Tyagi and Sharma, "Taming Resource Heterogeneity In Distributed ML Training With Dynamic
        Batching", ACSOS 2020, section on static batching. The formula printed there lacks the
        factor "number of workers times base batch", which the sum requires.
    """

    name = "static"

    def __init__(
        self,
        num_replicas: int,
        global_batch_size: int,
        *,
        weights: Sequence[float] | None = None,
        lower: ArrayLike | None = None,
        upper: ArrayLike | None = None,
    ) -> None:
        given = np.ones(num_replicas) if weights is None else np.asarray(weights, np.float64)
        if given.shape != (num_replicas,):
            raise ValueError(
                f"There must be one weight for each of {num_replicas} replicas. "
                f"Received: {weights}."
            )
        self._weights: FloatArray = given
        super().__init__(num_replicas, global_batch_size, lower=lower, upper=upper)

    def _first_weights(self) -> FloatArray:
        return self._weights

    def _first_reason(self) -> str:
        return "weights " + " ".join(f"{weight:g}" for weight in self._weights[:16])

    def _within_bounds(self) -> IntArray:
        return self._proportional(self._weights)
