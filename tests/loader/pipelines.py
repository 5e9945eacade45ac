"""Pipelines that users write, by name; each call builds an equal new one."""

import numpy as np
import tensorflow as tf

SAMPLES = 23


def indices():
    return tf.data.Dataset.range(SAMPLES)


def describe(index):
    value = tf.cast(index, tf.float32)
    return {"x": tf.stack([value, value * value]), "name": tf.strings.as_string(index)}, index % 3


def ragged_row(index):
    return tf.RaggedTensor.from_row_lengths(tf.range(2 * (index % 4)), [index % 4, index % 4])


def sparse_row(index):
    return tf.SparseTensor([[index % 5]], [tf.cast(index, tf.float32)], [5])


def jpeg_like(index):
    return tf.random.stateless_uniform([4, 4, 3], [7, tf.cast(index, tf.int32)]), index


ELEMENT = {
    "map": lambda: indices().map(describe).batch(5),
    "shuffle_map": lambda: indices().shuffle(50, seed=1).map(describe).batch(5),
    "map_shuffle": lambda: indices().map(describe).shuffle(7, seed=1).batch(5),
    "map_shuffle_once": lambda: (
        indices().map(describe).shuffle(7, seed=1, reshuffle_each_iteration=False).batch(5)
    ),
    "two_maps": lambda: (
        indices()
        .map(jpeg_like, num_parallel_calls=tf.data.AUTOTUNE)
        .shuffle(9, seed=2)
        .map(lambda image, label: (image * 2, label, None), num_parallel_calls=2)
        .batch(6, drop_remainder=True)
        .prefetch(tf.data.AUTOTUNE)
    ),
    "repeat_take_skip": lambda: (
        indices()
        .map(describe)
        .shuffle(6, seed=3)
        .repeat(2)
        .skip(3)
        .take(31)
        .prefetch(2)
        .batch(7, num_parallel_calls=2)
    ),
    "shuffle_shuffle": lambda: (
        indices().shuffle(8, seed=4).map(describe).shuffle(5, seed=5).batch(4)
    ),
    "shard_and_known_size": lambda: (
        indices()
        .filter(lambda index: index > 2)
        .apply(tf.data.experimental.assert_cardinality(20))
        .map(describe)
        .shard(2, 1)
        .apply(tf.data.experimental.assert_cardinality(10))
        .batch(4)
    ),
    "unknown_size": lambda: (
        indices().filter(lambda index: index % 2 == 0).map(describe).batch(5).prefetch(1)
    ),
    "map_above_cache": lambda: (
        indices().map(jpeg_like).cache().shuffle(9, seed=2).map(lambda x, y: (x + 1, y)).batch(5)
    ),
    "unknown_shapes": lambda: (
        indices()
        .map(lambda index: tf.io.decode_raw(tf.strings.as_string(index // 10), tf.uint8))
        .batch(1)
    ),
    "ragged_result": lambda: indices().map(ragged_row).batch(5),
    "sparse_result": lambda: indices().map(sparse_row).batch(5),
    "arrays": lambda: tf.data.Dataset.from_tensor_slices(
        (np.arange(40.0).reshape(20, 2), {"y": np.arange(20)})
    ).batch(6),
    "shuffled_arrays": lambda: (
        tf.data.Dataset.from_tensor_slices({"b": np.arange(20), "a": np.arange(40).reshape(20, 2)})
        .shuffle(9, seed=2)
        .repeat(2)
        .batch(7)
        .prefetch(2)
    ),
    "mapped_arrays": lambda: (
        tf.data.Dataset.from_tensor_slices(np.arange(21))
        .shuffle(9, seed=2)
        .map(describe, num_parallel_calls=2)
        .take(18)
        .map(lambda data, label: (data["x"], label, None))
        .batch(5)
    ),
    "dense_with_options": lambda: (
        indices()
        .map(describe, num_parallel_calls=2, deterministic=False)
        .with_options(_relaxed_options())
        .batch(5)
    ),
}

SLICE = {
    "no_map": lambda: indices().shuffle(50, seed=1).batch(5),
    "map_after_batch": lambda: (
        indices().map(describe).batch(5).map(lambda data, label: (data["x"][::-1], label))
    ),
    "ragged_batch": lambda: indices().map(lambda i: tf.range(i % 4)).ragged_batch(5),
    "padded_batch": lambda: indices().map(lambda i: tf.range(i % 4)).padded_batch(5),
    "sparse": lambda: tf.data.Dataset.from_tensor_slices(
        tf.SparseTensor([[i, i % 4] for i in range(20)], np.arange(20.0) + 1, [20, 4])
    ).batch(6),
    "ragged": lambda: tf.data.Dataset.from_tensor_slices(
        (tf.ragged.constant([[i] * (i % 3) for i in range(20)]), np.arange(20))
    ).batch(6),
    "unbatch": lambda: indices().map(describe).batch(4).unbatch().batch(5).map(lambda a, b: (b,)),
    "interleave": lambda: indices().interleave(
        lambda i: tf.data.Dataset.from_tensors(tf.fill([i % 3 + 1], i)), cycle_length=3
    ),
    "generator": lambda: tf.data.Dataset.from_generator(
        lambda: (np.full([rows, 2], rows) for rows in (4, 4, 1, 4, 2)),
        output_signature=tf.TensorSpec([None, 2], tf.int64),
    ),
    "concatenate": lambda: indices().batch(5).concatenate(indices().batch(3)),
    "cache_after_batch": lambda: indices().map(describe).batch(5).cache(),
}


def _relaxed_options():
    options = tf.data.Options()
    options.deterministic = False
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.FILE
    return options


ALL = {**ELEMENT, **SLICE}
