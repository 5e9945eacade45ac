"""Pipelines that are handed over, by name; each function builds one for the given knobs."""

import numpy as np
import tensorflow as tf

SAMPLES = 61


def numbers(size=SAMPLES):
    return tf.data.Dataset.range(size)


def double(value):
    return value * 2


def vectors(value):
    return tf.fill([value % 4 + 1], value)


def part(start):
    return tf.data.Dataset.range(start * 10, start * 10 + start + 3)


def in_python(value):
    result = tf.numpy_function(lambda number: number * 2, [value], tf.int64)
    result.set_shape([])
    return result


def augment(value):
    return value * 2, tf.random.uniform([])


def mapped(rows, knobs, function=double, **options):
    return rows.map(function, knobs.num_parallel_calls, **options)


def ended(rows, knobs):
    return rows.batch(4).prefetch(knobs.prefetch)


def doubled(rows, knobs, function=double, **options):
    return ended(mapped(rows, knobs, function, **options), knobs)


def plain(knobs):
    return doubled(numbers(), knobs)


def shuffled(knobs):
    return doubled(numbers().shuffle(17, seed=3), knobs)


def repeated(knobs):
    rows = numbers(20).shuffle(7, seed=3).repeat(3)
    return mapped(rows, knobs).batch(6).prefetch(knobs.prefetch)


def cached(knobs):
    return ended(mapped(numbers(), knobs).cache().shuffle(13, seed=2), knobs)


def interleaved(knobs):
    parts = numbers(9).interleave(
        part, cycle_length=3, block_length=2, num_parallel_calls=min(knobs.num_parallel_calls, 3)
    )
    return doubled(parts, knobs)


def sliced(knobs):
    rows = tf.data.Dataset.from_tensor_slices({"x": np.arange(120).reshape(60, 2), "y": range(60)})
    rows = rows.shuffle(60, seed=4)
    return rows.batch(8, num_parallel_calls=knobs.num_parallel_calls).prefetch(knobs.prefetch)


def grouped(knobs):
    windows = numbers().group_by_window(
        key_func=lambda value: value % 3, reduce_func=lambda _, rows: rows.batch(4), window_size=4
    )
    return mapped(windows, knobs).prefetch(knobs.prefetch)


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
    "plain": plain,
    "sequential_map": lambda knobs: ended(numbers().map(double), knobs),
    "shuffled": shuffled,
    "shuffled_once": lambda knobs: doubled(
        numbers().shuffle(17, seed=3, reshuffle_each_iteration=False), knobs
    ),
    "shuffled_last": lambda knobs: (
        mapped(numbers(), knobs)
        .shuffle(100, seed=5)
        .batch(4, drop_remainder=True)
        .prefetch(knobs.prefetch)
    ),
    "interleaved": interleaved,
    "sequential_interleave": lambda knobs: doubled(
        numbers(9).interleave(lambda start: tf.data.Dataset.range(start + 3), cycle_length=3), knobs
    ),
    "flat_mapped": lambda knobs: doubled(numbers(12).flat_map(tf.data.Dataset.range), knobs),
    "zipped": lambda knobs: ended(
        tf.data.Dataset.zip((mapped(numbers(), knobs), numbers().shuffle(11, seed=8))), knobs
    ),
    "filtered": lambda knobs: doubled(numbers().filter(lambda value: value % 3 > 0), knobs),
    "padded": lambda knobs: (
        mapped(numbers(), knobs, vectors).padded_batch(4).prefetch(knobs.prefetch)
    ),
    "concatenated": lambda knobs: doubled(
        numbers(20).concatenate(numbers(30).skip(5).take(20)), knobs
    ),
    "sliced": sliced,
    "mapped_batches": lambda knobs: mapped(numbers().batch(4), knobs).prefetch(knobs.prefetch),
    "python_function": lambda knobs: doubled(numbers(), knobs, in_python),
    "grouped": grouped,
    "rebatched": lambda knobs: (
        mapped(numbers(), knobs).batch(8).rebatch(3).prefetch(knobs.prefetch)
    ),
}

# Reproducible in an epoch; later epochs may have another order after a handover.
FIRST_ROUND = {"cached": cached, "repeated": repeated}

# The order or a part of the elements may be another one: each element comes exactly once.
UNORDERED = {
    **FIRST_ROUND,
    "repeated_outside": lambda knobs: (
        mapped(numbers(20), knobs).shuffle(9, seed=1).batch(3).repeat(3).prefetch(knobs.prefetch)
    ),
    "shuffled_without_a_seed": lambda knobs: doubled(numbers().shuffle(17), knobs),
    "not_deterministic": lambda knobs: doubled(numbers(), knobs, deterministic=False),
    "random_augmentation": lambda knobs: doubled(numbers(), knobs, augment),
}


def from_generator(knobs):
    rows = tf.data.Dataset.from_generator(
        lambda: iter(range(20)), output_signature=tf.TensorSpec([], tf.int64)
    )
    return doubled(rows, knobs)


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
    "sampled": (
        lambda knobs: doubled(
            tf.data.Dataset.sample_from_datasets([numbers(20), numbers(40)], [0.3, 0.7], seed=6),
            knobs,
        ),
        "sample_from_datasets",
    ),
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
