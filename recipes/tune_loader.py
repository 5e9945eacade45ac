"""Decode real JPEG files fast enough for the device: before and after, with a figure.

Writes generated photographs to a folder, then trains twice from it: files are "far away" (each
read waits, as on network storage), the device is a sleep of a few milliseconds. The first training
leaves everything to AUTOTUNE; the second uses `LoaderTuner`, which changes the pipeline while it
runs.

    python recipes/tune_loader.py [--steps N] [--latency-milliseconds N] [--plot FILE]
"""

import argparse
import os
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
import numpy as np
import tensorflow as tf
from tune_loader_figure import draw

import keras_het

SIDE, BATCH, DEVICE_SECONDS = 160, 16, 0.010


def write_photographs(folder, count):
    """Write smooth random pictures, which cost JPEG about as much to decode as photographs."""
    random = np.random.default_rng(0)
    for number in range(count):
        coarse = random.random((10, 10, 3), np.float32)
        picture = tf.image.resize(coarse, [SIDE, SIDE], "bicubic")
        picture += 0.05 * random.standard_normal((SIDE, SIDE, 3))
        pixels = tf.cast(tf.clip_by_value(picture, 0.0, 1.0) * 255.0, tf.uint8)
        tf.io.write_file(str(folder / f"{number % 3}_{number:04}.jpg"), tf.io.encode_jpeg(pixels))


def builder(folder, samples, latency):
    """Return what LoaderTuner needs: a function that builds the same dataset with other knobs."""
    names = sorted(str(path) for path in folder.glob("*.jpg"))

    def far_away(name):
        time.sleep(latency)
        return name

    def load(name):
        name = tf.ensure_shape(tf.numpy_function(far_away, [name], tf.string), [])
        image = tf.ensure_shape(tf.io.decode_jpeg(tf.io.read_file(name), 3), [SIDE, SIDE, 3])
        image = tf.image.resize(tf.image.random_flip_left_right(image), [32, 32]) / 255.0
        label = tf.strings.to_number(tf.strings.substr(tf.strings.split(name, "/")[-1], 0, 1))
        return image, label

    def build(knobs):
        files = tf.data.Dataset.from_tensor_slices(names).repeat(-(-samples // len(names)))
        images = files.shuffle(1000, seed=1).map(load, knobs.num_parallel_calls)
        return images.take(samples).batch(BATCH).prefetch(knobs.prefetch)

    return build


class Device(keras.callbacks.Callback):
    """The device's part of a step, and a clock."""

    def __init__(self):
        super().__init__()
        self.ends = []

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(DEVICE_SECONDS)
        self.ends.append(time.perf_counter())


def train(dataset, callbacks=()):
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Conv2D(4, 3, strides=4), keras.layers.Flatten(), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((32, 32, 3)), *layers])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(dataset.take(2), verbose=0)  # traces the step
    device = Device()
    device.ends.append(time.perf_counter())
    model.fit(dataset, verbose=0, callbacks=[*callbacks, device])
    return np.array(device.ends) - device.ends[0]


def speed(ends):
    return (len(ends) - 1) / ends[-1]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--latency-milliseconds", type=float, default=15.0)
    parser.add_argument("--plot", type=Path, default=Path("tune_loader.png"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_photographs(folder, 64)
        latency = arguments.latency_milliseconds / 1e3
        build = builder(folder, arguments.steps * BATCH, latency)

        automatic = SimpleNamespace(num_parallel_calls=tf.data.AUTOTUNE, prefetch=tf.data.AUTOTUNE)
        before = train(build(automatic))
        tuner = keras_het.callbacks.LoaderTuner(verbose=1)
        after = train(keras_het.loader.tunable_pipeline(build), [tuner])

    limit = 1.0 / DEVICE_SECONDS
    print(f"AUTOTUNE:    {speed(before):6.1f} steps/s")
    print(f"LoaderTuner: {speed(after):6.1f} steps/s, {speed(after) / speed(before):.2f} x")
    print(f"The device alone could do at most {limit:.0f} steps/s.")
    moves = [(move.step, str(move.plan)) for move in tuner.moves if move.refused is None]
    draw(before, after, moves, limit, arguments.plot)
    print(arguments.plot)


if __name__ == "__main__":
    main()
