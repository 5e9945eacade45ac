"""Pipelines before and after each advice of the loader."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import tensorflow as tf

READ_SECONDS = 0.002  # per record in remote storage
SIDE, IMAGES, CLASSES, BATCH = 160, 256, 10, 32
FILES = 8
ROWS, COLUMNS = 20_000, 32
AUTOTUNE = tf.data.AUTOTUNE


def write_images(folder: Path) -> None:
    """Write JPEG files, the same in compressed TFRecord files, and text files of numbers."""
    random = np.random.default_rng(0)
    names = [folder / f"{number * CLASSES // IMAGES}_{number:04}.jpg" for number in range(IMAGES)]
    for name in names:
        picture = tf.image.resize(random.random((10, 10, 3), np.float32), [SIDE, SIDE], "bicubic")
        pixels = tf.cast(tf.clip_by_value(picture, 0.0, 1.0) * 255.0, tf.uint8)
        name.write_bytes(tf.io.encode_jpeg(pixels).numpy())
    for file in range(FILES):
        part = names[file * IMAGES // FILES : (file + 1) * IMAGES // FILES]
        with tf.io.TFRecordWriter(str(folder / f"{file}.tfrecord"), "GZIP") as writer:
            for name in part:
                writer.write(name.read_bytes())
        numbers = range(file * 100, (file + 1) * 100)
        (folder / f"{file}.txt").write_text("".join(f"{number}\n" for number in numbers))


def decode(data):
    image = tf.ensure_shape(tf.io.decode_jpeg(data, 3), [SIDE, SIDE, 3])
    return tf.image.resize(image, [64, 64]) / 255.0


def load(name):
    label = tf.strings.to_number(tf.strings.substr(tf.strings.split(name, "/")[-1], 0, 1))
    return decode(tf.io.read_file(name)), label


def flip(image, label):
    return tf.image.random_flip_left_right(image), label


def names_of(folder):
    return tf.data.Dataset.list_files(str(folder / "*.jpg"), seed=1)


def decode_each_epoch(folder):
    return names_of(folder).map(load, AUTOTUNE).map(flip, AUTOTUNE).batch(BATCH).prefetch(2)


def decode_once(folder):
    names = tf.data.Dataset.list_files(str(folder / "*.jpg"), shuffle=False)
    images = names.map(load, AUTOTUNE).cache().shuffle(IMAGES, seed=1)
    return images.map(flip, AUTOTUNE).batch(BATCH).prefetch(2)


def table():
    values = np.random.default_rng(0).random((ROWS, COLUMNS), np.float32)
    return tf.data.Dataset.from_tensor_slices(values).shuffle(ROWS, seed=1)


def standardise(row):
    return (tf.math.log1p(row) - 0.36) / 0.2


def samples_mapped(folder):
    return table().map(standardise, AUTOTUNE).batch(256).prefetch(2)


def batches_mapped(folder):
    return table().batch(256).map(standardise, AUTOTUNE).prefetch(2)


def records(name):
    return tf.data.TFRecordDataset(name, "GZIP").map(decode)


def shards(folder):
    return tf.data.Dataset.list_files(str(folder / "*.tfrecord"), seed=1)


def one_reader(folder):
    return shards(folder).interleave(records, cycle_length=4).batch(BATCH).prefetch(2)


def several_readers(folder):
    images = shards(folder).interleave(records, cycle_length=4, num_parallel_calls=AUTOTUNE)
    return images.batch(BATCH).prefetch(2)


def from_far_away(record):
    def wait(data):
        time.sleep(READ_SECONDS)
        return data

    return tf.ensure_shape(tf.numpy_function(wait, [record], tf.string), [])


def far_records(name):
    return tf.data.TFRecordDataset(name, "GZIP").map(from_far_away).map(decode)


def one_waits(folder):
    return shards(folder).interleave(far_records, cycle_length=4).batch(BATCH).prefetch(2)


def several_wait(folder):
    images = shards(folder).interleave(far_records, cycle_length=4, num_parallel_calls=AUTOTUNE)
    return images.batch(BATCH).prefetch(2)


def is_wanted(image, label):
    return label < 2


def decode_then_filter(folder):
    return names_of(folder).map(load, AUTOTUNE).filter(is_wanted).batch(8).prefetch(2)


def with_label(name):
    parts = tf.strings.split(name, "/")
    return name, tf.strings.to_number(tf.strings.substr(parts[-1], 0, 1))


def decode_wanted(name, label):
    return decode(tf.io.read_file(name)), label


def filter_then_decode(folder):
    wanted = names_of(folder).map(with_label, AUTOTUNE).filter(is_wanted)
    return wanted.map(decode_wanted, AUTOTUNE).batch(8).prefetch(2)


def standardise_in_python(row):
    return tf.ensure_shape(
        tf.numpy_function(lambda x: (np.log1p(x) - 0.36) / 0.2, [row], tf.float32), [COLUMNS]
    )


def python_mapped(folder):
    return table().map(standardise_in_python, AUTOTUNE).batch(256).prefetch(2)


def lines(name):
    return tf.data.TextLineDataset(name).map(lambda line: tf.strings.to_number(line, tf.int64))


def same_order(folder):
    files = tf.data.Dataset.list_files(str(folder / "*.txt"), shuffle=False)
    return files.flat_map(lines).shuffle(50).batch(16)


def other_order(folder):
    return tf.data.Dataset.list_files(str(folder / "*.txt")).flat_map(lines).shuffle(50).batch(16)


# kind of advice, circumstances: the pipeline with the weakness, and the one that follows the advice
SPEED = {
    "cacheable_prefix": (decode_each_epoch, decode_once),
    "vectorisable_map": (samples_mapped, batches_mapped),
    "sequential_interleave": (one_reader, several_readers),
    "sequential_interleave, reads that wait": (one_waits, several_wait),
    "late_filter": (decode_then_filter, filter_then_decode),
    "python_function": (python_mapped, samples_mapped),
}
ORDER = {"unshuffled_shards": (same_order, other_order)}
