"""Two trainings of different speeds share one input pipeline: the faster one takes more.

A tf.data service prepares the batches: a dispatcher here and a worker in a separate process, as
it would run on a spare CPU machine (`keras-het loader-worker`). Two processes take batches of the
same epoch, one with a device (a sleep: EMULATED) four times faster than the other's. Every sample
is used exactly once across both, which is checked.

    python recipes/feed_from_elsewhere.py [--samples N]
"""

import argparse
import collections
import json
import os
import subprocess
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
import tensorflow as tf
from rich.console import Console
from rich.table import Table

import keras_het

BATCH = 8
DEVICE_SECONDS = {"fast": 0.015, "slow": 0.060}


def pipeline(samples):
    """Build the pipeline, the same in every process: the workers run what a consumer registers."""

    def prepare(number):
        x = tf.random.stateless_normal([16], [number, 0])
        return number, x, tf.reduce_sum(x, keepdims=True)

    numbers = tf.data.Dataset.range(samples).shuffle(samples, seed=1)
    return numbers.map(prepare, num_parallel_calls=2).batch(BATCH)


class Device(keras.callbacks.Callback):
    """The device's part of a step."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(self.seconds)


def consume(name, address, samples):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.train_on_batch(tf.zeros([BATCH, 16]), tf.zeros([BATCH, 1]))  # traces the step
    print("ready", flush=True)
    sys.stdin.readline()  # both start together
    data = keras_het.loader.service(address)
    got = []

    def note(numbers):
        got.append(numbers.tolist())
        return numbers

    def noted(numbers, x, y):
        # Python runs here, not in the workers of the service
        with tf.control_dependencies([tf.numpy_function(note, [numbers], tf.int64)]):
            return tf.identity(x), tf.identity(y)

    batches = data.distribute(pipeline(samples), job="train").map(noted)
    model.fit(batches, verbose=0, callbacks=[Device(DEVICE_SECONDS[name])])
    print(json.dumps(got), flush=True)


def start(*arguments):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *arguments], **pipes)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=1600)
    parser.add_argument("--consume", nargs=2, metavar=("NAME", "ADDRESS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.consume:
        return consume(*arguments.consume, arguments.samples)
    with keras_het.loader.service(workers=0) as data:
        module = ("-m", "keras_het", "loader-worker")
        worker = start(*module, "--dispatcher", data.address)
        options = ("--samples", str(arguments.samples), "--consume")
        consumers = {name: start(__file__, *options, name, data.address) for name in DEVICE_SECONDS}
        try:
            for process in (worker, *consumers.values()):
                process.stdout.readline()
            for process in consumers.values():
                process.stdin.write("\n")
                process.stdin.flush()
            # a killed consumer reports nothing
            got = {
                name: json.loads(each.stdout.readline() or "[]") for name, each in consumers.items()
            }
        finally:
            worker.terminate()
            for process in (worker, *consumers.values()):
                process.communicate(timeout=60)
    show(got, arguments.samples)


def show(got, samples):
    """Print which process took how many batches; `got` has the sample numbers of each batch."""
    table = Table(title="One epoch, shared by two consumers (EMULATED devices)")
    for column in ("consumer", "device ms a batch", "batches", "part"):
        table.add_column(column, justify="left" if column == "consumer" else "right")
    total = sum(map(len, got.values()))
    for name, batches in got.items():
        part = f"{len(batches) / max(total, 1):.0%}"
        table.add_row(name, f"{DEVICE_SECONDS[name] * 1e3:.0f}", str(len(batches)), part)
    Console().print(table)
    times = collections.Counter(
        number for batches in got.values() for batch in batches for number in batch
    )
    missing = sum(times[number] == 0 for number in range(samples))
    again = sum(count > 1 for count in times.values())
    if missing or again:
        raise SystemExit(
            f"Expected each of {samples} samples once. {missing} did not arrive, {again} came more "
            "than once. A consumer that does not come to its end takes its samples with it."
        )
    print(f"{total} batches of {BATCH}, of {samples} samples: each once.")


if __name__ == "__main__":
    main()
