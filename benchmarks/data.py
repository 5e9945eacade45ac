"""Samples/s of unequally shared input against plain `dataset.batch(n)` on the same source.

One worker of a cluster consumes its share; the peer is one process that batches the same number of
rows. `throughput_ratio` is our rows/s over the peer's, median of interleaved pairs;
`map_calls_ratio` is the worker's own calls of the costly map over the rows it delivered.

    python benchmarks/data.py [--json FILE] [--quick]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf
from _report import environment, print_table, write_report
from keras.src.trainers.data_adapters import get_data_adapter

from keras_het.loader import GlobalOrderDataset
from keras_het.planning import ReplicaLayout

LAYOUTS = {"one replica": ((1,), [1]), "4 of 4:2:1": ((1, 1, 1), [4, 2, 1])}


def slices(steps, batch):
    data = np.random.default_rng(0).random((batch * steps, 256), np.float32)
    labels = np.arange(len(data))
    return lambda: tf.data.Dataset.from_tensor_slices((data, labels)).shuffle(1000, seed=1), None


def keras_arrays(steps, batch):
    """What `fit(x, y)` makes of arrays; the batch size is part of the source."""
    data = np.random.default_rng(0).random((batch * steps, 256), np.float32)
    labels = np.arange(len(data))

    def source(rows):
        keras.utils.set_random_seed(1)
        return get_data_adapter(data, labels, batch_size=rows, shuffle=True).get_tf_dataset()

    return source, None


def jpeg(steps, batch):
    pixels = np.random.default_rng(0).integers(0, 255, (16, 96, 96, 3), np.uint8)
    encoded = tf.stack([tf.io.encode_jpeg(image) for image in pixels])

    def decode(index):
        image = tf.io.decode_jpeg(encoded[index % 16], channels=3)
        return tf.image.resize(tf.ensure_shape(image, [96, 96, 3]), [64, 64]), index

    return lambda: tf.data.Dataset.range(batch * steps).shuffle(1000, seed=1), decode


def small(steps, batch):
    return (
        lambda: tf.data.Dataset.range(batch * steps),
        lambda index: tf.cast(index, tf.float32) * 2.0,
    )


CASES = {
    "arrays through Keras": keras_arrays,
    "slices of arrays": slices,
    "costly map (JPEG)": jpeg,
    "small elements": small,
}


def consume(dataset):
    """Rows/s of this worker's batches, without those up to the second, which pay for the start."""
    rows, start = 0, None
    for step, (batch, count) in enumerate(dataset):
        if step == 1:
            start, rows = time.perf_counter(), 0
        elif start is not None:
            rows += count
        del batch
    return rows / (time.perf_counter() - start)


def batches(source, function, rows):
    if source.__name__ == "source":
        return source(rows)
    dataset = source()
    if function is not None:
        dataset = dataset.map(function, num_parallel_calls=tf.data.AUTOTUNE)
    return dataset.batch(rows).prefetch(2)


def ours(source, function, layout, weights, batch, change_every):
    calls = [0]

    def current():
        calls[0] += 1
        turn = (calls[0] // change_every) % 2 if change_every else 0
        return weights[::-1] if turn and len(weights) > 1 else weights

    dataset = batches(source, function, batch)
    return GlobalOrderDataset(
        dataset, ReplicaLayout(layout, 0), current, lambda batches, sizes: (batches, int(sizes[0]))
    )


def plain(source, function, rows):
    dataset = batches(source, function, rows)
    for batch in dataset:
        yield batch, int(tf.nest.flatten(batch)[0].shape[0])


def compare(case, layout_name, change_every, batch, steps, repeats):
    source, function = CASES[case](steps, batch)
    layout, weights = LAYOUTS[layout_name]
    rows = batch * weights[0] // sum(weights)
    shared = ours(source, function, layout, weights, batch, change_every)
    pairs = [(consume(shared), consume(plain(source, function, rows))) for _ in range(repeats)]
    ratios = sorted(ours_ / plain_ for ours_, plain_ in pairs)
    calls = None
    if function is not None:
        calls = map_calls(source, function, layout, weights, batch, change_every)
    return {
        "case": case + (f", shares change every {change_every} steps" if change_every else ""),
        "policy": layout_name,
        "mode": shared.mode,
        "throughput_ratio": round(statistics.median(ratios), 3),
        "lowest_ratio": round(ratios[0], 3),
        "highest_ratio": round(ratios[-1], 3),
        "samples_per_second": round(statistics.median(pair[0] for pair in pairs)),
        "plain_samples_per_second": round(statistics.median(pair[1] for pair in pairs)),
        "map_calls_ratio": calls,
        "global_batch_size": batch,
        "num_steps": steps,
        "num_runs": repeats,
    }


def map_calls(source, function, layout, weights, batch, change_every):
    """Own calls of the map over rows delivered, in a separate run that counts them."""
    calls = [0]

    def count(value):
        calls[0] += 1
        return value

    def counted(*element):
        first = tf.numpy_function(count, [element[-1]], element[-1].dtype)
        return function(*element[:-1], tf.ensure_shape(first, element[-1].shape))

    shared = ours(source, counted, layout, weights, batch, change_every)
    delivered = sum(rows for _, rows in shared)
    return calls[0] / delivered


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    batch, steps, repeats = (70, 12, 2) if options.quick else (140, 120, 5)
    rows = [
        compare(case, layout, change, batch, steps, repeats)
        for case in CASES
        for layout, change in (("one replica", 0), ("4 of 4:2:1", 0), ("4 of 4:2:1", 10))
    ]
    print_table(rows)
    write_report("data", rows, options.json, environment())


if __name__ == "__main__":
    main()
