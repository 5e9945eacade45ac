"""`tf.nn.compute_average_loss` of custom loops divides by the samples of all replicas."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from keras_het.strategy.exact_step import current_step
from keras_het.strategy.extended import HeterogeneousExtended

_NAME = "compute_average_loss"


def install_average_loss() -> None:
    """Makes `tf.nn.compute_average_loss` right for replicas of unequal shares; for good, once.

    Without `global_batch_size` TensorFlow takes the replica's own samples times the number of
    replicas for the samples of all. For a `HeterogeneousStrategy` they are counted instead.
    """
    original = tf.nn.compute_average_loss
    if getattr(original, "counts_samples", False):
        return

    @functools.wraps(original)
    def compute_average_loss(
        per_example_loss: Any, sample_weight: Any = None, global_batch_size: Any = None
    ) -> Any:
        context = tf.distribute.get_replica_context()
        if global_batch_size is None and context is not None and _are_unequal(context.strategy):
            per_example_loss = tf.convert_to_tensor(per_example_loss)
            if per_example_loss.shape.rank != 0:  # of which TensorFlow says what is wrong
                own = tf.shape(per_example_loss, tf.int64)[0]
                global_batch_size = context.all_reduce("SUM", own)
        return original(per_example_loss, sample_weight, global_batch_size)

    compute_average_loss.counts_samples = True  # type: ignore[attr-defined]
    tf.nn.compute_average_loss = compute_average_loss


def check_caller(name: str) -> None:
    """Refuses TensorFlow's own function, which was imported by name before it was replaced.

    Args:
        name: of the function that asks for the number of replicas.

    Raises:
        ValueError: if it is that function, in a custom loop.
    """
    if name == _NAME and current_step() is None:
        raise ValueError(
            "compute_average_loss cannot know the samples of all replicas, which have unequal "
            "shares. Received: TensorFlow's own function, imported by name, without "
            "global_batch_size. Call it as tf.nn.compute_average_loss, or give it "
            "global_batch_size, the samples of a step over all replicas."
        )


def _are_unequal(strategy: Any) -> bool:
    is_ours = isinstance(strategy.extended, HeterogeneousExtended)
    return is_ours and strategy.extended.layout.num_replicas > 1 and current_step() is None
