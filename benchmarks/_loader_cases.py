"""Pipelines and consumers of benchmarks/loader.py, and one run of `fit` with a policy."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import resource
import time
from types import SimpleNamespace

import keras
import numpy as np
import tensorflow as tf

import keras_het
from keras_het.loader import Knobs
from keras_het.strategy.measure.emulated_device import queue_of

IO_SECONDS = 0.010


@dataclasses.dataclass(frozen=True)
class Case:
    """A case to measure.

    `make(steps)` returns a builder; the consumer sleeps `device_seconds` (the device's part) and
    spins for `host_seconds` in each step; `burst` steps run at once, then it pauses as long. With
    `shares` the step runs under `HeterogeneousStrategy` on as many devices of this process, which
    get these parts of each batch. `is_ordinary`: `LoaderTuner` gets the dataset that "autotune"
    trains with. Meanwhile `other_programs` compute without end. An `asynchronous` device, emulated
    by keras_het, works ahead of the host, and its own idle time is measured.
    """

    make: object
    device_seconds: float
    host_seconds: float = 0.0
    workers: int = 1
    burst: int = 1
    epochs: int = 1
    shares: tuple[int, ...] = ()
    is_ordinary: bool = False
    other_programs: int = 0
    asynchronous: bool = False


def sleeping(value):
    def wait(number):
        time.sleep(IO_SECONDS)
        return number

    result = tf.numpy_function(wait, [value], tf.int64)
    result.set_shape([])
    return result


def jpegs(side):
    pixels = np.random.default_rng(0).integers(0, 255, (8, side // 8, side // 8, 3), np.uint8)
    images = [np.kron(image, np.ones((8, 8, 1), np.uint8)) for image in pixels]
    return tf.stack([tf.io.encode_jpeg(image) for image in images])


def decoded(encoded, index, side):
    image = tf.io.decode_jpeg(encoded[index % 8], channels=3)
    image = tf.image.resize(tf.ensure_shape(image, [side, side, 3]), [32, 32])
    return tf.reduce_mean(image, axis=[1, 2]) / 255.0


def finished(dataset, knobs, batch):
    labelled = dataset.map(lambda row: (row, tf.zeros([1])), num_parallel_calls=None)
    return labelled.batch(batch).prefetch(knobs.prefetch)


def blocking_io(steps, batch=8):
    def build(knobs):
        def load(index):
            return tf.fill([32], tf.cast(sleeping(index) % 7, tf.float32))

        rows = tf.data.Dataset.range(steps * batch)
        return finished(rows.map(load, num_parallel_calls=knobs.num_parallel_calls), knobs, batch)

    return build


def jpeg(steps, batch=8, side=192):
    encoded = jpegs(side)

    def build(knobs):
        rows = tf.data.Dataset.range(steps * batch)
        rows = rows.map(
            lambda index: decoded(encoded, index, side),
            num_parallel_calls=knobs.num_parallel_calls,
        )
        return finished(rows, knobs, batch)

    return build


def io_then_cpu(steps, batch=8, side=192):
    encoded = jpegs(side)

    def build(knobs):
        def load(index):
            return tf.cond(
                index < steps * batch // 2,
                lambda: tf.fill([32], tf.cast(sleeping(index) % 7, tf.float32)),
                lambda: decoded(encoded, index, side),
            )

        rows = tf.data.Dataset.range(steps * batch)
        rows = rows.map(load, num_parallel_calls=knobs.num_parallel_calls)
        return finished(rows, knobs, batch)

    return build


def megabytes(steps):
    def build(knobs):
        def load(index):
            row = tf.random.stateless_uniform([512, 512], [1, tf.cast(index, tf.int32)])
            return row, tf.zeros([512, 1])

        rows = tf.data.Dataset.range(steps)
        rows = rows.map(load, num_parallel_calls=knobs.num_parallel_calls)
        return rows.prefetch(knobs.prefetch)

    return build


def in_memory(steps, batch=32):
    values = tf.constant(np.random.default_rng(0).random((steps * batch, 32), np.float32))

    def build(knobs):
        rows = tf.data.Dataset.range(steps).map(
            lambda step: (values[step * batch : (step + 1) * batch], tf.zeros([batch, 1])),
            num_parallel_calls=knobs.num_parallel_calls,
        )
        return rows.prefetch(knobs.prefetch)

    return build


# A step of `fit` itself takes the host about 1.5 ms: including it, a step whose batch is ready
# takes about 4 ms in (a) and (c), and 9 ms in (d), 3 ms of them on the host; a batch of (d) costs
# about 8 ms of CPU, so two workers want more than two CPUs.
CASES = {
    "a: blocking I/O": Case(blocking_io, device_seconds=0.0025),
    "b: JPEG decoding": Case(jpeg, device_seconds=0.002),
    "c: I/O, then CPU": Case(io_then_cpu, device_seconds=0.0025),
    "d: two workers, one host": Case(
        lambda steps: jpeg(steps, batch=24), device_seconds=0.006, host_seconds=0.0015, workers=2
    ),
    "e: bursts of 1 MB": Case(megabytes, device_seconds=0.004, burst=32),
    "f: epoch boundaries": Case(lambda steps: jpeg(steps, batch=2), 0.010, epochs=7),
    "g: perfect already": Case(in_memory, device_seconds=0.005),
    "h: blocking I/O, strategy": Case(blocking_io, device_seconds=0.0025, shares=(3, 1)),
    "i: blocking I/O, ordinary": Case(blocking_io, device_seconds=0.0025, is_ordinary=True),
    "j: blocking I/O, busy host": Case(blocking_io, device_seconds=0.0025, other_programs=2),
    "k: JPEG, busy host": Case(jpeg, device_seconds=0.002, other_programs=2),
    "l: blocking I/O, device ahead": Case(blocking_io, 0.010, shares=(1,), asynchronous=True),
}


class Consumer(keras.callbacks.Callback):
    """The device's and the host's part of a step; records when each step ended."""

    def __init__(self, case, most_seconds):
        super().__init__()
        self.case, self.most_seconds = case, most_seconds
        self.ends, self.epochs = [], []

    def on_train_batch_end(self, batch, logs=None):
        case = self.case
        end = time.perf_counter() + case.host_seconds
        while time.perf_counter() < end:
            pass
        if case.burst == 1 and not case.asynchronous:
            time.sleep(case.device_seconds)
        elif batch % case.burst == 0:
            time.sleep(case.device_seconds * case.burst)
        self.ends.append(time.perf_counter())
        if self.ends[-1] - self.ends[0] > self.most_seconds:
            self.model.stop_training = True

    def on_epoch_begin(self, epoch, logs=None):
        self.epochs.append(len(self.ends))


def scope_of(case):
    """Return the scope in which the model of a case is made."""
    if not case.shares:
        return contextlib.nullcontext()
    (cpu,) = tf.config.list_physical_devices("CPU")
    devices = [tf.config.LogicalDeviceConfiguration() for _ in case.shares]
    tf.config.set_logical_device_configuration(cpu, devices)
    names = [f"CPU:{number}" for number in range(len(devices))]
    if case.asynchronous:
        device = {"speed": 1.0, "fixed_seconds": case.device_seconds, "seconds_per_sample": 0.0}
        os.environ["KERAS_HET_EMULATED_DEVICES"] = json.dumps([{**device, "asynchronous": True}])
    return keras_het.HeterogeneousStrategy(names, share_weights=list(case.shares)).scope()


def run(name, policy, steps, most_seconds, settings=None, barrier=None):
    """Train with one policy in this process; return the measurements.

    Policies: "autotune", "fixed", "tuner", "oracle" with its settings, and "ready" for a consumer
    whose batch is always ready.
    """
    tf.config.threading.set_intra_op_parallelism_threads(1)
    case = CASES[name]
    scope = scope_of(case)
    per_epoch = max(steps // case.epochs, 4)
    build = case.make(per_epoch)
    automatic = SimpleNamespace(num_parallel_calls=tf.data.AUTOTUNE, prefetch=tf.data.AUTOTUNE)
    if policy == "autotune" or (policy == "tuner" and case.is_ordinary):
        dataset = build(automatic)
    elif policy == "ready":
        batch = next(iter(build(Knobs(2, 2, 2))))
        dataset = tf.data.Dataset.from_tensors(batch).repeat(per_epoch)
    else:
        dataset = keras_het.loader.tunable_pipeline(build, Knobs(*settings) if settings else None)
    with scope:
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(build(Knobs(2, 2, 2)).take(2), verbose=0)  # traces the step
    consumer = Consumer(case, most_seconds)
    callbacks = [consumer]
    if policy == "tuner":
        callbacks.insert(0, keras_het.callbacks.LoaderTuner())
    if barrier is not None:
        barrier.wait()
    start, started = time.perf_counter(), time.time()
    model.fit(dataset, epochs=case.epochs, verbose=0, callbacks=callbacks)
    consumer.ends.insert(0, start)
    ends = np.array(consumer.ends)
    times = np.diff(ends)
    starts = [first for first in consumer.epochs[1:] if first < len(times)]
    stalls = [times[first] - np.median(times) for first in starts]
    tuner = callbacks[0] if policy == "tuner" else None
    idle = None
    if case.asynchronous:
        computed = len(times) * case.device_seconds
        idle = 1.0 - computed / (queue_of(0).busy_until - started)
    return {
        "idle": idle,
        "steps_per_s": len(times) / (ends[-1] - ends[0]),
        "longest_stall_ms": max(stalls) * 1e3 if stalls else None,
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "moves": len(tuner.moves) if tuner else 0,
        "steps": len(times),
        "measured_steps": tuner.train_input_wait.steps if tuner else None,
        "settings": str(tuner.best_settings().knobs) if tuner else None,
    }


def in_child(connection, arguments, barrier):
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    try:
        connection.send(run(*arguments, barrier=barrier))
    except Exception as error:
        connection.send(repr(error))
