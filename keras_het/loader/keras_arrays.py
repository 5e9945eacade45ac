"""Arrays that were given to `fit`, in an order that other processes can draw again."""

from __future__ import annotations

import tensorflow as tf

from keras_het.loader import tf_data_adapter as adapter

_SEED = 0
"""TensorFlow's global seed, which `keras.utils.set_random_seed` sets, counts besides."""


def with_repeatable_order(dataset: tf.data.Dataset, seed: int = _SEED) -> tf.data.Dataset:
    """The same samples as Keras has them in arrays, but with tf.data's `shuffle`.

    Keras draws the order of an epoch from TensorFlow's generator of random numbers, which nobody
    can set to a later epoch; and nothing tells how many batches there are.

    Args:
        dataset: what Keras's `fit` makes of its arguments.
        seed: on which orders depend, besides the global seed and the number of the epoch.

    Returns:
        A data set of dense arrays in equal batches, with a known number of them; of anything else
        `dataset` itself.
    """
    found = adapter.keras_arrays(_without_prefetch(dataset))
    if found is None or found.arrays is None:
        return dataset
    samples = tf.data.Dataset.from_tensor_slices(found.arrays)
    if found.is_shuffled:
        samples = samples.shuffle(found.samples, seed=seed)
    return samples.batch(found.batch_size)


def with_order_of_epoch(dataset: tf.data.Dataset, seed: int) -> tf.data.Dataset:
    """Arrays that Keras shuffles, in another order each epoch also under a global seed.

    With one, Keras's way to shuffle gives all epochs the same order.

    Args:
        dataset: what Keras's `fit` makes of its arguments.
        seed: as for `with_repeatable_order`.

    Returns:
        A data set of equal batches; `dataset` itself if it has no arrays, or does not shuffle them.
    """
    node = _without_prefetch(dataset)
    found = adapter.keras_arrays(node)
    if found is None or not found.is_shuffled:
        return dataset
    if found.arrays is not None:
        return with_repeatable_order(dataset, seed)
    indices = tf.data.Dataset.range(found.samples).shuffle(found.samples, seed=seed)
    return adapter.with_keras_indices(node, indices.batch(found.batch_size))


def _without_prefetch(dataset: tf.data.Dataset) -> tf.data.Dataset:
    while adapter.is_prefetch_or_options(dataset):
        (dataset,) = adapter.inputs_of(dataset)
    return dataset
