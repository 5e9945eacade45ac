"""How the moving statistics of all workers are averaged."""

from __future__ import annotations

from typing import Any

from keras_het.strategy.rules import ElasticAveraging


class StatisticsAveraging(ElasticAveraging):
    r"""Each worker pulls the center a step of 1/n towards its own, and its own towards the center.

    .. math:: c \leftarrow c + \alpha (s_i - c), \qquad s_i \leftarrow s_i + \alpha (c - s_i).

    To the service, which keeps the center, this is elastic averaging, and has its name. Both are
    means, so that a variance is never negative. A worker that took steps while the answer
    travelled takes the mean with its statistics of now: the difference at the time of sending may
    be larger than what is left of a variance that has fallen since.

    Args:
        alpha: moving rate, at most 1.
    """

    def receive(self, weights: Any, sent_weights: Any, answer: Any) -> Any:
        """The mean with the center."""
        del sent_weights
        return weights + self.alpha * (answer - weights)
