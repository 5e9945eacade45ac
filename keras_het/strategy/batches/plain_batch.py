"""Batches that bypass the strategy's data path, such as those given to `train_on_batch`.

They are global batches, the same on every worker, and are cut into shares within the step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import keras
import numpy as np
import tensorflow as tf

from keras_het.loader.order import rows
from keras_het.planning import apportion
from keras_het.strategy.batches.uneven_per_replica import wrap_shares
from keras_het.value_types import Leaf, Nest

if TYPE_CHECKING:
    from keras_het.strategy.heterogeneous_strategy import HeterogeneousStrategy


def share_out(strategy: HeterogeneousStrategy, data: Nest) -> Nest:
    """Cut a plain batch by the share weights in effect when the step runs."""
    leaves = tf.nest.flatten(data)
    if any(isinstance(leaf, tf.distribute.DistributedValues) for leaf in leaves):
        return data
    leaves = [_as_tensor(leaf) for leaf in leaves]
    to_cut = [leaf for leaf in leaves if _has_rows(leaf)]
    if not to_cut:
        return data
    sizes = _sizes(strategy, rows.count_rows(to_cut))
    starts = tf.cumsum(sizes, exclusive=True)

    def part(replica: int) -> Nest:
        cut = iter(rows.slice_rows(to_cut, starts[replica], sizes[replica]))
        own = [next(cut) if _has_rows(leaf) else leaf for leaf in leaves]
        return tf.nest.pack_sequence_as(data, own)

    return wrap_shares([part(replica) for replica in strategy.layout.local_replicas], sizes)


def refuse_compiled_batch(model: keras.Model, data: Nest) -> None:
    """Refuse plain batches in a step compiled by XLA, which cannot ask for the shares."""
    leaves = tf.nest.flatten(data)
    is_cut = any(isinstance(leaf, tf.distribute.DistributedValues) for leaf in leaves)
    if model.jit_compile and not model.run_eagerly and not is_cut:
        raise ValueError(
            "A step that XLA compiles cannot cut a batch into the shares of several replicas. "
            "Received: train_on_batch or test_on_batch of a model with jit_compile=True. Give a "
            "tf.data.Dataset of one batch to fit or evaluate, or leave jit_compile out of "
            "model.compile()."
        )


def _as_tensor(leaf: Leaf) -> Leaf:
    is_array = hasattr(leaf, "__array__") and not rows.is_sliceable(leaf)
    return tf.convert_to_tensor(leaf) if is_array else leaf


def _has_rows(leaf: Leaf) -> bool:
    return rows.is_sliceable(leaf) and leaf.shape.rank != 0


def _sizes(strategy: HeterogeneousStrategy, total: tf.Tensor) -> tf.Tensor:
    num_replicas = strategy.layout.num_replicas
    if num_replicas == 1:
        return tf.reshape(total, [1])

    # Called in every step: one trace serves all shares.
    def apportioned(total: np.int64 | np.ndarray) -> np.ndarray:
        return np.asarray(apportion(int(total), strategy.shares), np.int64)

    return tf.ensure_shape(tf.numpy_function(apportioned, [total], tf.int64), [num_replicas])
