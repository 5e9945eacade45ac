"""Cost of measuring the input wait of a step of `fit`.

- "own code": Python of the meter in a step that does nothing, with its batches ready, in
  microseconds. "tf.data" is an ordinary dataset, "other" the data path of a strategy.
- "fit": a step of about 1 ms with and without the callback, in one process and in turns; the median
  of the ratios of neighbouring blocks. `controller="fixed"` only measures; "tuner" may act as well.

    python benchmarks/input_wait_meter.py [--json FILE] [--quick]
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
import numpy as np
import tensorflow as tf
from _report import environment, print_table, write_report

import keras_het
from keras_het.callbacks import LoaderTuner
from keras_het.fit.session import FitSession

STEP_MICROSECONDS = 1000.0
WARM_UP_STEPS = 5


def only_measuring():
    return LoaderTuner("fixed", cooperate_with_other_jobs=False)


def step_that_does_nothing(data):
    for _ in zip(range(1), data):  # noqa: B905 - as Keras reads an iterator
        pass


def own_code(kind, blocks, steps):
    """Time metered steps and plain ones that do nothing; return a row."""
    dataset = tf.data.Dataset.range(4).repeat()
    iterator = iter(dataset) if kind == "tf.data" else itertools.repeat(1)
    tuner, model = only_measuring(), keras.Sequential()
    model.train_function = step_that_does_nothing
    plain_model = SimpleNamespace(train_function=step_that_does_nothing)
    tuner.set_model(model)
    with FitSession(model, "fit"):
        tuner.on_train_begin()
        tuner.on_epoch_begin(0)
        model.train_function(iterator)
        plain = iterator
        if kind == "tf.data":
            batch = next(iterator)
            # reading is no part of the meter, and takes ten times as long
            tuner._session.live._read = lambda: batch
            plain = [batch]

        def timed(model, data):
            start = time.perf_counter()
            for _ in range(steps):
                model.train_function(data)  # as Keras does
            return (time.perf_counter() - start) / steps * 1e6

        added = sorted(timed(model, iterator) - timed(plain_model, plain) for _ in range(blocks))
        tuner.on_train_end()
    median = statistics.median(added)
    return {
        "case": f"own code, {kind}",
        "policy": "fixed",
        "added_microseconds": round(median, 2),
        "lowest_microseconds": round(added[0], 2),
        "highest_microseconds": round(added[-1], 2),
        "part_of_1_ms": round(median / STEP_MICROSECONDS, 5),
        "num_blocks": blocks,
        "steps_per_block": steps,
    }


class Clock(keras.callbacks.Callback):
    """Timer of all steps of an epoch except the first ones."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == WARM_UP_STEPS - 1:
            self.start = time.perf_counter()
        if batch >= WARM_UP_STEPS:
            self.seconds = (time.perf_counter() - self.start) / (batch + 1 - WARM_UP_STEPS)


def make_model():
    hidden = [keras.layers.Dense(128, activation="relu") for _ in range(2)]
    model = keras.Sequential([keras.Input((64,)), *hidden, keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    return model


def fit(kind, blocks, steps):
    """Time `fit` in short blocks with and without the callback; return a row for each policy."""
    if kind == "strategy":
        with keras_het.HeterogeneousStrategy(["CPU:0"]).scope():
            model = make_model()
    else:
        model = make_model()
    random = np.random.default_rng(0)
    batch = random.normal(size=(64, 64)).astype("float32"), random.integers(0, 10, 64)
    dataset = tf.data.Dataset.from_tensors(batch).repeat(steps + WARM_UP_STEPS)
    policies = {
        "without": list,
        "fixed": lambda: [only_measuring()],
        "tuner": lambda: [LoaderTuner()],
    }

    def block(policy):
        clock = Clock()
        model.fit(dataset, verbose=0, callbacks=[*policies[policy](), clock])
        return clock.seconds * 1e3

    for policy in policies:
        block(policy)  # traces the step
    times = {policy: [] for policy in policies}
    for turn in range(blocks):
        for policy in list(policies)[:: 1 if turn % 2 else -1]:
            times[policy].append(block(policy))
    return [row_of(kind, policy, times) for policy in policies if policy != "without"]


def row_of(kind, policy, times):
    pairs = zip(times[policy], times["without"], strict=True)
    ratios = sorted(ours / without for ours, without in pairs)
    return {
        "case": f"fit, {kind}",
        "policy": policy,
        "step_time_ratio": round(statistics.median(ratios), 4),
        "lower_quartile_ratio": round(ratios[len(ratios) // 4], 4),
        "upper_quartile_ratio": round(ratios[3 * len(ratios) // 4], 4),
        "step_milliseconds": round(statistics.median(times[policy]), 4),
        "step_milliseconds_without": round(statistics.median(times["without"]), 4),
        "num_blocks": len(ratios),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    blocks, own_steps, steps = (2, 200, 20) if arguments.quick else (41, 20000, 200)
    rows = [own_code(kind, min(blocks, 11), own_steps) for kind in ("tf.data", "other")]
    print_table(rows, ["case", "added_microseconds", "part_of_1_ms"])
    fits = [row for kind in ("tf.data", "strategy") for row in fit(kind, blocks, steps)]
    columns = ["case", "policy", "step_time_ratio", "lower_quartile_ratio", "upper_quartile_ratio"]
    print_table(fits, [*columns, "step_milliseconds", "step_milliseconds_without"])
    write_report("input_wait_meter", rows + fits, arguments.json, environment())


if __name__ == "__main__":
    main()
