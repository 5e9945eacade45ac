"""Arrays that were given to `fit`, in an order that other processes can draw again."""

from __future__ import annotations

import tensorflow as tf

from keras_het.loader import tf_data_adapter as adapter

_SEED = 0
"""TensorFlow's global seed, which `keras.utils.set_random_seed` sets, counts besides."""


def with_repeatable_order(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The same samples as Keras has them in arrays, but with tf.data's `shuffle`.

    Keras draws the order of an epoch from TensorFlow's generator of random numbers, which nobody
    can set to a later epoch; and nothing tells how many batches there are.

    Args:
        dataset: what Keras's `fit` makes of its arguments.

    Returns:
        A data set of dense arrays in equal batches, with a known number of them; of anything else
        `dataset` itself. Orders depend on the global seed alone.
    """
    node = dataset
    while adapter.is_prefetch_or_options(node):
        (node,) = adapter.inputs_of(node)
    found = adapter.keras_arrays(node)
    if found is None:
        return dataset
    samples = tf.data.Dataset.from_tensor_slices(found.arrays)
    if found.is_shuffled:
        samples = samples.shuffle(int(samples.cardinality()), seed=_SEED)
    return samples.batch(found.batch_size)
