"""Arrays that were given to `fit`, in an order that other processes can reproduce."""

from __future__ import annotations

import tensorflow as tf

from keras_het.loader import iterator_adapter
from keras_het.loader import tf_data_adapter as adapter

_SECOND_SEED_OF_0 = 2**31 - 1


def with_repeatable_order(dataset: tf.data.Dataset, seed: int | None = None) -> tf.data.Dataset:
    """Return the samples of Keras's arrays, but shuffled by tf.data's `shuffle`."""
    # Keras draws the order of an epoch from TensorFlow's generator of random numbers, which cannot
    # be set to a later epoch; and nothing tells how many batches there are.
    found = adapter.keras_arrays(_without_prefetch(dataset))
    if found is None or found.arrays is None:
        return dataset
    samples = tf.data.Dataset.from_tensor_slices(found.arrays)
    if found.is_shuffled:
        samples = samples.shuffle(found.samples, seed=seed or 0)
    return samples.batch(found.batch_size)


def with_order_of_epoch(dataset: tf.data.Dataset, seed: int) -> tf.data.Dataset:
    """Reorder arrays that Keras shuffles in each epoch; a global seed gives all the same order."""
    node = _without_prefetch(dataset)
    found = adapter.keras_arrays(node)
    if found is None or not found.is_shuffled:
        return dataset
    if found.arrays is not None:
        return with_repeatable_order(dataset, seed)
    indices = tf.data.Dataset.range(found.samples).shuffle(found.samples, seed=seed)
    return adapter.with_keras_indices(node, indices.batch(found.batch_size))


def seeds_of_orders(dataset: tf.data.Dataset) -> list[list[int | None]]:
    """Return the two seeds of each shuffle, None if unknown, 0 if an order cannot be restored."""
    found: list[list[int | None]] = []
    for node in adapter.upstream_of(dataset):
        if adapter.is_shuffle(node):
            seeds = adapter.shuffle_seeds(node)
            found.append([None if seed is None else int(seed) for seed in seeds])
        elif (arrays := adapter.keras_arrays(node)) is not None and arrays.is_shuffled:
            seed = iterator_adapter.global_seed()
            # as TensorFlow keeps seed 0 apart from none
            found.append([0, 0] if seed is None else [seed, seed or _SECOND_SEED_OF_0])
    return found


def _without_prefetch(dataset: tf.data.Dataset) -> tf.data.Dataset:
    while adapter.is_prefetch_or_options(dataset):
        (dataset,) = adapter.inputs_of(dataset)
    return dataset
