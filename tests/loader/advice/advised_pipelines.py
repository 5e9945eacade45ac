"""Pipelines with known weaknesses, and the same without them."""

from __future__ import annotations

import threading

import tensorflow as tf

BATCH = 16
SAMPLES = 192
_storage = threading.Event()


def heavy(value):
    """A millisecond of deterministic work in TensorFlow operations, the same for batches."""
    value = tf.cast(value, tf.float32)
    matrix = tf.fill([128, 128], tf.reduce_mean(value) * 1e-9)
    for _ in range(6):
        matrix = tf.matmul(matrix, matrix) + 1e-9
    return value + 0.0 * matrix[0, 0] * 0.0


def decoded(number):
    return heavy(number), number % 5


def light(value):
    return tf.cast(value, tf.float32) * 2.0 + 1.0


def many_light(value):
    """Many small operations: what they cost is being called."""
    value = tf.cast(value, tf.float32)
    for _ in range(60):
        value = tf.abs(value + 1.0) - 0.5
    return value


def centred(vector):
    """Gives another result for a batch; `tf.vectorized_map` gives the same."""
    vector = tf.cast(vector, tf.float32)
    for _ in range(30):
        vector = vector - tf.reduce_mean(vector) + 0.5
    return vector


def randomly(value):
    return tf.cast(value, tf.float32) + tf.random.uniform([])


def slow_in_python(value):
    def work(number):
        sum(range(20_000))
        return number

    return tf.ensure_shape(tf.numpy_function(work, [value], value.dtype), value.shape)


def slow_file(number):
    """Elements of a file on emulated storage far away: each takes 2 ms."""
    source = tf.data.Dataset.range(40)

    def read(value):
        def wait(received):
            _storage.wait(0.002)
            return received

        return number * 40 + tf.ensure_shape(tf.numpy_function(wait, [value], tf.int64), [])

    return source.map(read)


def good():
    """Nothing to say: decoded in parallel, cached, shuffled, augmented, batched, prefetched."""
    samples = tf.data.Dataset.range(SAMPLES).map(heavy, tf.data.AUTOTUNE).cache()
    shuffled = samples.shuffle(SAMPLES, seed=1)
    augmented = shuffled.map(lambda value: value + tf.random.uniform([]), tf.data.AUTOTUNE)
    return augmented.batch(BATCH).prefetch(2)


def good_arrays():
    rows = tf.data.Dataset.from_tensor_slices(tf.zeros([SAMPLES, 8]))
    return rows.shuffle(SAMPLES).batch(BATCH).map(light).prefetch(2)


def write_records(folder, files=4, records=30):
    names = []
    for number in range(files):
        names.append(str(folder / f"{number}.tfrecord"))
        with tf.io.TFRecordWriter(names[-1]) as writer:
            for record in range(records):
                writer.write(f"{number}-{record}".encode())
    return names
