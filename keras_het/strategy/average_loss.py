"""`tf.nn.compute_average_loss` of custom loops, divided by the samples of all replicas."""

from __future__ import annotations

import functools
import inspect
from types import CodeType, FrameType

import tensorflow as tf

from keras_het.strategy.exact.step import current_step
from keras_het.strategy.extended import HeterogeneousExtended
from keras_het.value_types import TensorLike

_original_code: CodeType | None = None
# In newer versions TensorFlow's function asks through two others.
_FRAMES_BETWEEN = 3


def install_average_loss() -> None:
    """Make `tf.nn.compute_average_loss` correct for unequal shares; permanent, installed once.

    Without `global_batch_size` TensorFlow estimates the total number of samples as the replica's
    own samples times the number of replicas. For a `HeterogeneousStrategy` they are counted
    instead.
    """
    global _original_code
    original = tf.nn.compute_average_loss
    if getattr(original, "counts_samples", False):
        return

    @functools.wraps(original)
    def compute_average_loss(
        per_example_loss: tf.Tensor,
        sample_weight: TensorLike | None = None,
        global_batch_size: tf.Tensor | int | None = None,
    ) -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        if global_batch_size is None and context is not None and _are_unequal(context.strategy):
            per_example_loss = tf.convert_to_tensor(per_example_loss)
            if per_example_loss.shape.rank != 0:  # TensorFlow explains what is wrong with a scalar
                own = tf.shape(per_example_loss, tf.int64)[0]
                global_batch_size = context.all_reduce("SUM", own)
        return original(per_example_loss, sample_weight, global_batch_size)

    _original_code = inspect.unwrap(original).__code__
    compute_average_loss.counts_samples = True  # type: ignore[attr-defined]
    tf.nn.compute_average_loss = compute_average_loss


def check_caller(frame: FrameType | None) -> None:
    """Refuse TensorFlow's own function if it was imported by name before it was replaced."""
    for _ in range(_FRAMES_BETWEEN):
        if frame is None:
            return
        if frame.f_code is _original_code:
            break
        frame = frame.f_back
    else:
        return
    if current_step() is None:
        raise ValueError(
            "compute_average_loss cannot know the samples of all replicas, which have unequal "
            "shares. Received: TensorFlow's own function, imported by name, without "
            "global_batch_size. Call it as tf.nn.compute_average_loss, or give it "
            "global_batch_size, the samples of a step over all replicas."
        )


def _are_unequal(strategy: tf.distribute.Strategy) -> bool:
    is_ours = isinstance(strategy.extended, HeterogeneousExtended)
    return is_ours and strategy.extended.layout.num_replicas > 1 and current_step() is None
