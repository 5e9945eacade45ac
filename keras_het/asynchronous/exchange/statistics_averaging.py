"""How the moving statistics of all workers are averaged."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_het.asynchronous.rules import ElasticAveraging


class StatisticsAveraging(ElasticAveraging):
    """Elastic averaging, in which a worker's statistics stay between its own and the center's.

    A worker that took steps while the answer travelled moves by the difference at the time of
    sending, so that nothing that it learned meanwhile is lost. That difference may be larger than
    what is left of a variance that has fallen since: hence the bound. To the service, which keeps
    the center, this is elastic averaging, and has its name.

    Args:
        alpha: moving rate, at most 1.
    """

    def receive(self, weights: Any, sent_weights: Any, answer: Any) -> Any:
        """Its own, moved towards the center as the center was towards it, but not beyond."""
        if self.alpha == 1:  # nobody else moves the center: it is what this worker sent
            return weights
        pulled = super().receive(weights, sent_weights, answer)
        return tf.clip_by_value(pulled, tf.minimum(weights, answer), tf.maximum(weights, answer))
