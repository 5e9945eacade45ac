"""Arrays that were given to `fit`, in an order that other processes can draw again."""

from __future__ import annotations

import tensorflow as tf

from keras_het.loader import iterator_adapter
from keras_het.loader import tf_data_adapter as adapter


def with_repeatable_order(dataset: tf.data.Dataset, seed: int | None = None) -> tf.data.Dataset:
    """The same samples as Keras has them in arrays, but with tf.data's `shuffle`.

    Keras draws the order of an epoch from TensorFlow's generator of random numbers, which nobody
    can set to a later epoch; and nothing tells how many batches there are.

    Args:
        dataset: what Keras's `fit` makes of its arguments.
        seed: on which orders depend, besides the number of the epoch and a global seed of the
            user; 0 if None.

    Returns:
        A data set of dense arrays in equal batches, with a known number of them; of anything else
        `dataset` itself.
    """
    found = adapter.keras_arrays(_without_prefetch(dataset))
    if found is None or found.arrays is None:
        return dataset
    samples = tf.data.Dataset.from_tensor_slices(found.arrays)
    if found.is_shuffled:
        samples = samples.shuffle(found.samples, seed=seed or 0)
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


def seeds_of_orders(dataset: tf.data.Dataset) -> list[list[int | None]]:
    """The two seeds of each shuffle of a pipeline, None where they cannot be told.

    Both are 0 where nothing can bring an order back.
    """
    found: list[list[int | None]] = []
    for node in adapter.upstream_of(dataset):
        if adapter.is_shuffle(node):
            seeds = adapter.shuffle_seeds(node)
            found.append([None if seed is None else int(seed) for seed in seeds])
        elif (arrays := adapter.keras_arrays(node)) is not None and arrays.is_shuffled:
            found.append([iterator_adapter.global_seed() or 0] * 2)
    return found


def _without_prefetch(dataset: tf.data.Dataset) -> tf.data.Dataset:
    while adapter.is_prefetch_or_options(dataset):
        (dataset,) = adapter.inputs_of(dataset)
    return dataset
