"""Pipelines that are handed over, by name; each function builds one for the given knobs."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

SAMPLES = 61


def numbers(size=SAMPLES):
    return tf.data.Dataset.range(size)


def double(value):
    return value * 2


def vectors(value):
    return tf.fill([value % 4 + 1], value)


def plain(knobs):
    return numbers().map(double, knobs.num_parallel_calls).batch(4).prefetch(knobs.prefetch)


def sequential_map(knobs):
    return numbers().map(double).batch(4).prefetch(knobs.prefetch)


def shuffled(knobs):
    shuffled = numbers().shuffle(17, seed=3).map(double, knobs.num_parallel_calls)
    return shuffled.batch(4).prefetch(knobs.prefetch)


def shuffled_once(knobs):
    shuffled = numbers().shuffle(17, seed=3, reshuffle_each_iteration=False)
    return shuffled.map(double, knobs.num_parallel_calls).batch(4).prefetch(knobs.prefetch)


def shuffled_last(knobs):
    mapped = numbers().map(double, knobs.num_parallel_calls).shuffle(100, seed=5)
    return mapped.batch(4, drop_remainder=True).prefetch(knobs.prefetch)


def repeated(knobs):
    repeated = numbers(20).shuffle(7, seed=3).repeat(3)
    return repeated.map(double, knobs.num_parallel_calls).batch(6).prefetch(knobs.prefetch)


def repeated_outside(knobs):
    mapped = numbers(20).map(double, knobs.num_parallel_calls).shuffle(9, seed=1)
    return mapped.batch(3).repeat(3).prefetch(knobs.prefetch)


def interleaved(knobs):
    def part(start):
        return tf.data.Dataset.range(start * 10, start * 10 + start + 3)

    parts = numbers(9).interleave(
        part, cycle_length=3, block_length=2, num_parallel_calls=min(knobs.num_parallel_calls, 3)
    )
    return parts.map(double, knobs.num_parallel_calls).batch(4).prefetch(knobs.prefetch)


def sequential_interleave(knobs):
    parts = numbers(9).interleave(lambda start: tf.data.Dataset.range(start + 3), cycle_length=3)
    return parts.map(double, knobs.num_parallel_calls).batch(4).prefetch(knobs.prefetch)


def flat_mapped(knobs):
    parts = numbers(12).flat_map(lambda start: tf.data.Dataset.range(start))
    return parts.map(double, knobs.num_parallel_calls).batch(4).prefetch(knobs.prefetch)


def cached(knobs):
    mapped = numbers().map(double, knobs.num_parallel_calls).cache()
    return mapped.shuffle(13, seed=2).batch(4).prefetch(knobs.prefetch)


def zipped(knobs):
    left = numbers().map(double, knobs.num_parallel_calls)
    right = numbers().shuffle(11, seed=8)
    return tf.data.Dataset.zip((left, right)).batch(4).prefetch(knobs.prefetch)


def filtered(knobs):
    odd = numbers().filter(lambda value: value % 3 > 0)
    return odd.map(double, knobs.num_parallel_calls).batch(4).prefetch(knobs.prefetch)


def padded(knobs):
    rows = numbers().map(vectors, knobs.num_parallel_calls)
    return rows.padded_batch(4).prefetch(knobs.prefetch)


def concatenated(knobs):
    both = numbers(20).concatenate(numbers(30).skip(5).take(20))
    return both.map(double, knobs.num_parallel_calls).batch(4).prefetch(knobs.prefetch)


def sliced(knobs):
    rows = tf.data.Dataset.from_tensor_slices({"x": np.arange(120).reshape(60, 2), "y": range(60)})
    rows = rows.shuffle(60, seed=4)
    return rows.batch(8, num_parallel_calls=knobs.num_parallel_calls).prefetch(knobs.prefetch)


def mapped_batches(knobs):
    return numbers().batch(4).map(double, knobs.num_parallel_calls).prefetch(knobs.prefetch)


def python_function(knobs):
    def call(value):
        result = tf.numpy_function(lambda number: number * 2, [value], tf.int64)
        result.set_shape([])
        return result

    return numbers().map(call, knobs.num_parallel_calls).batch(4).prefetch(knobs.prefetch)


def grouped(knobs):
    windows = numbers().group_by_window(
        key_func=lambda value: value % 3, reduce_func=lambda _, rows: rows.batch(4), window_size=4
    )
    return windows.map(double, knobs.num_parallel_calls).prefetch(knobs.prefetch)


def rebatched(knobs):
    mapped = numbers().map(double, knobs.num_parallel_calls)
    return mapped.batch(8).rebatch(3).prefetch(knobs.prefetch)


def sampled(knobs):
    sources = [numbers(20), numbers(40)]
    both = tf.data.Dataset.sample_from_datasets(sources, [0.3, 0.7], seed=6)
    return both.map(double, knobs.num_parallel_calls).batch(4).prefetch(knobs.prefetch)


def records_of(paths):
    def records(knobs):
        files = tf.data.Dataset.from_tensor_slices(paths).shuffle(len(paths), seed=9)
        rows = files.interleave(
            tf.data.TFRecordDataset,
            cycle_length=2,
            num_parallel_calls=min(knobs.num_parallel_calls, 2),
            deterministic=True,
        )
        numbers = rows.shuffle(8, seed=2).map(
            lambda row: tf.strings.to_number(row, tf.int64), knobs.num_parallel_calls
        )
        return numbers.batch(4).prefetch(knobs.prefetch)

    return records


def write_records(folder):
    paths = []
    for number in range(5):
        path = str(folder / f"{number}.tfrecord")
        with tf.io.TFRecordWriter(path) as writer:
            for row in range(11 + number):
                writer.write(str(100 * number + row).encode())
        paths.append(path)
    return paths


# The order is reproducible, so that it must be the same with and without handovers.
ORDERED = {
    build.__name__: build
    for build in (
        plain,
        sequential_map,
        shuffled,
        shuffled_once,
        shuffled_last,
        interleaved,
        sequential_interleave,
        flat_mapped,
        zipped,
        filtered,
        padded,
        concatenated,
        sliced,
        mapped_batches,
        python_function,
        grouped,
        rebatched,
    )
}


def shuffled_without_a_seed(knobs):
    mapped = numbers().shuffle(17).map(double, knobs.num_parallel_calls)
    return mapped.batch(4).prefetch(knobs.prefetch)


def not_deterministic(knobs):
    mapped = numbers().map(double, knobs.num_parallel_calls, deterministic=False)
    return mapped.batch(4).prefetch(knobs.prefetch)


def random_augmentation(knobs):
    def augment(value):
        return value * 2, tf.random.uniform([])

    return numbers().map(augment, knobs.num_parallel_calls).batch(4).prefetch(knobs.prefetch)


# Reproducible in an epoch; later epochs may have another order after a handover.
FIRST_ROUND = {build.__name__: build for build in (cached, repeated)}

# The order or a part of the elements may be another one: each element comes exactly once.
UNORDERED = {
    build.__name__: build
    for build in (
        cached,
        repeated,
        repeated_outside,
        shuffled_without_a_seed,
        not_deterministic,
        random_augmentation,
    )
}


def from_generator(knobs):
    rows = tf.data.Dataset.from_generator(
        lambda: iter(range(20)), output_signature=tf.TensorSpec([], tf.int64)
    )
    return rows.map(double, knobs.num_parallel_calls).batch(4).prefetch(knobs.prefetch)


def prefetched_to_a_device(knobs):
    batches = numbers().map(double, knobs.num_parallel_calls).batch(4)
    return batches.apply(tf.data.experimental.prefetch_to_device("/CPU:0", knobs.prefetch))


def symbolic(knobs):
    options = tf.data.Options()
    options.experimental_symbolic_checkpoint = True
    return plain(knobs).with_options(options)


REFUSED = {
    "from_generator": (from_generator, "from_generator"),
    "prefetched_to_a_device": (prefetched_to_a_device, "device cannot save"),
    "sampled": (sampled, "sample_from_datasets"),
    "symbolic": (symbolic, "experimental_symbolic_checkpoint"),
    "other_batch_size": (
        lambda knobs: numbers().map(double, 2).batch(3 + knobs.prefetch).prefetch(2),
        "batch size and drop_remainder",
    ),
    "other_shuffle": (
        lambda knobs: numbers().shuffle(3 + knobs.prefetch, seed=1).batch(4).prefetch(2),
        "buffer_size of",
    ),
    "other_cycle": (
        lambda knobs: numbers(9).interleave(
            lambda start: tf.data.Dataset.range(start), cycle_length=2 + knobs.prefetch
        ),
        "cycle_length of",
    ),
    "other_length": (lambda knobs: numbers().take(20 + knobs.prefetch), "count of"),
    "other_padded_batch": (
        lambda knobs: numbers().map(vectors).padded_batch(3 + knobs.prefetch).prefetch(2),
        "batch_size of PaddedBatch was 5 and would be 6",
    ),
    "other_padding": (
        lambda knobs: numbers().map(vectors).padded_batch(4, None, np.int64(-knobs.prefetch)),
        "padding_values of PaddedBatch",
    ),
    "other_rebatch": (
        lambda knobs: numbers().batch(8).rebatch(1 + knobs.prefetch),
        "batch_sizes of Rebatch",
    ),
    "other_window": (
        lambda knobs: numbers().window(2 + knobs.prefetch).flat_map(lambda rows: rows.batch(9)),
        "shift of Window was 4 and would be 5",
    ),
    "other_range": (
        lambda knobs: tf.data.Dataset.range(knobs.prefetch, 20),
        "start of Range was 2 and would be 3",
    ),
    "other_slices": (
        lambda knobs: tf.data.Dataset.from_tensor_slices([1, 2, knobs.prefetch]),
        "tensors of TensorSlice",
    ),
    "other_operations": (
        lambda knobs: numbers() if knobs.prefetch % 2 else numbers().prefetch(knobs.prefetch),
        "operations differ",
    ),
    "other_elements": (
        lambda knobs: numbers().map(lambda value: tf.fill([knobs.prefetch], value)),
        "elements differ",
    ),
    "other_order_of_files": (
        lambda knobs: numbers().batch(4, num_parallel_calls=knobs.prefetch % 2 * 4 or None),
        "operations differ",
    ),
}


def flat(epochs):
    return [sorted(value for batch in epoch for value in values(batch)) for epoch in epochs]


def values(batch):
    if isinstance(batch, dict):
        batch = batch["x"]
    return np.ravel(batch[0] if isinstance(batch, tuple) else batch).tolist()
