"""Samples/s of unequally shared input against plain `dataset.batch(n)` on the same source.

The peer is one process that batches as many rows as the worker gets on average. Policies:

- "one replica": a worker that gets every row;
- "three replicas": a worker with three replicas of shares 4:2:1, which change every 10 steps;
- "4 of 7, two workers": a worker of two gets 4/7 of the rows and must follow the common order;
- "4 of 7, changing": the same, its share changes between 5/7 and 3/7 every 10 steps.

`throughput_ratio` is our rows/s over the peer's, median of interleaved pairs; `map_calls_ratio` is
the worker's own calls of the map over the rows that it delivered.

    python benchmarks/data.py [--json FILE] [--quick]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf
from _report import environment, print_table, write_report
from keras.src.trainers.data_adapters import get_data_adapter

from keras_het.loader import GlobalOrderDataset
from keras_het.planning import ReplicaLayout

# Replicas of each worker, and the weights used for ten steps each, in turn.
POLICIES = {
    "one replica": ((1,), ((1,),)),
    "three replicas": ((3,), ((4, 2, 1), (1, 2, 4))),
    "4 of 7, two workers": ((1, 1), ((4, 3),)),
    "4 of 7, changing": ((1, 1), ((5, 2), (3, 4))),
}
STEPS_OF_A_WEIGHT = 10


def slices(steps, batch):
    data = np.random.default_rng(0).random((batch * steps, 256), np.float32)
    labels = np.arange(len(data))
    return lambda: tf.data.Dataset.from_tensor_slices((data, labels)).shuffle(1000, seed=1), None


def keras_arrays(steps, batch):
    """Return `fit(x, y)`'s dataset from arrays; the batch size is part of the source."""
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


# Source, and steps of a run that takes about half a second.
CASES = {
    "arrays through Keras": (keras_arrays, 1000),
    "slices of arrays": (slices, 1000),
    "costly map (JPEG)": (jpeg, 60),
    "small elements": (small, 300),
}


def consume(dataset):
    """Return the rows/s of this worker's batches after the second, excluding startup costs."""
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


def ours(source, function, policy, batch):
    replicas_per_worker, cycle = POLICIES[policy]
    calls = [0]

    def weights():
        calls[0] += 1
        return cycle[(calls[0] // STEPS_OF_A_WEIGHT) % len(cycle)]

    layout = ReplicaLayout(replicas_per_worker, 0)
    own = slice(layout.local_replicas.start, layout.local_replicas.stop)
    return GlobalOrderDataset(
        batches(source, function, batch),
        layout,
        weights,
        lambda batches, sizes: (batches, int(sizes[own].sum())),
    )


def own_rows(policy, batch):
    """Return the average rows per step of the measured worker."""
    replicas_per_worker, cycle = POLICIES[policy]
    own = sum(sum(weights[: replicas_per_worker[0]]) for weights in cycle)
    return batch * own // sum(map(sum, cycle))


def plain(source, function, rows):
    dataset = batches(source, function, rows)
    for batch in dataset:
        yield batch, int(tf.nest.flatten(batch)[0].shape[0])


def compare(case, policy, batch, repeats, most_steps):
    make, steps = CASES[case]
    steps = min(steps, most_steps)
    source, function = make(steps, batch)
    rows = own_rows(policy, batch)
    shared = ours(source, function, policy, batch)
    pairs = [(consume(shared), consume(plain(source, function, rows))) for _ in range(repeats)]
    ratios = sorted(ours_ / plain_ for ours_, plain_ in pairs)
    calls = None if function is None else map_calls(source, function, policy, batch)
    return {
        "case": case,
        "policy": policy,
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


def map_calls(source, function, policy, batch):
    """Return own map calls per delivered row, in a separate run that counts them."""
    calls = [0]

    def count(value):
        calls[0] += 1
        return value

    def counted(*element):
        first = tf.numpy_function(count, [element[-1]], element[-1].dtype)
        return function(*element[:-1], tf.ensure_shape(first, element[-1].shape))

    delivered = sum(rows for _, rows in ours(source, counted, policy, batch))
    return calls[0] / delivered


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    batch, repeats, most_steps = (70, 2, 12) if options.quick else (140, 9, 1000)
    rows = [
        compare(case, policy, batch, repeats, most_steps) for case in CASES for policy in POLICIES
    ]
    ratios = ("throughput_ratio", "lowest_ratio", "highest_ratio", "map_calls_ratio")
    print_table(rows, ["case", "policy", "mode", *ratios])
    write_report("data", rows, options.json, environment())


if __name__ == "__main__":
    main()
