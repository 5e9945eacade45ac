"""Step time of HeterogeneousStrategy against TensorFlow's own strategies on an even cluster.

    python benchmarks/overhead.py [--json FILE] [--quick] [--gpu]

Two processes: stock Keras 3 `fit` does not run under MultiWorkerMirroredStrategy, so that strategy
is driven by the custom training loop of its guide (mode "fit": our `fit` against that loop; mode
"custom_loop": the same loop under both). One process with two devices: `fit` under both, and
compiled by XLA against MirroredStrategy, which cannot be. One device, compiled, against plain
Keras, compiled too. Then `fit` on emulated devices that work ahead of their hosts, as GPUs do: with
callbacks that measure, against `fit` without them; names of models say how long a host takes to
queue a step, and a device to compute it. Two such devices get each batch by a copy that takes time,
too: while the step before is computed, against within the step. With `--gpu` instead: one GPU
against Keras without a strategy, with and without `Telemetry`, and two parts of a GPU against
MirroredStrategy.

All clusters are alive for the whole run and take turns in short blocks, so a drift of the machine
affects both; a row is the median of the ratios of neighbouring blocks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _report import environment, print_table, write_report

from keras_het.launch.local.free_ports import ReservedPorts

GLOBAL_BATCH = 64
MODELS = ("dense", "convnet")
# topology -> mode -> (our driver, stock driver)
CASES = {
    "two_processes": {
        "fit": ("ours:fit", "multi_worker_mirrored:loop"),
        "custom_loop": ("ours:loop", "multi_worker_mirrored:loop"),
    },
    "two_devices": {
        "fit": ("ours:fit", "mirrored:fit"),
        # MirroredStrategy cannot compile
        "compiled_fit": ("ours:compiled_fit", "mirrored:fit"),
    },
    "one_device": {"compiled_fit": ("ours:compiled_fit", "none:compiled_fit")},
}
AHEAD = ("h1.2_d3.6", "h14_d80")
AHEAD_CASES = {
    topology: {
        "fit_with_balancer": ("ours:balanced_fit", "ours:fit"),
        "fit_with_telemetry": ("ours:telemetry_fit", "ours:fit"),
        "fit_with_both": ("ours:watched_fit", "ours:fit"),
    }
    for topology in ("one_device_ahead", "two_workers_ahead")
}
COPIED = ("h1.2_d3.6_c1", "h14_d80_c20")
COPIED_CASES = {
    "two_devices_ahead": {"batches_copied_ahead": ("ours:copying_ahead", "ours:copying_in_step")}
}
GPU_CASES = {
    "one_gpu": {
        "fit": ("ours:fit", "none:fit"),
        "compiled_fit": ("ours:compiled_fit", "none:compiled_fit"),
        "measured_fit": ("ours:balanced_fit", "none:fit"),
        "fit_with_telemetry": ("ours:telemetry_fit", "ours:fit"),
    },
    "two_parts_of_a_gpu": {
        "fit": ("ours:fit", "mirrored:fit"),
        "compiled_fit": ("ours:compiled_fit", "mirrored:fit"),
    },
}
GPU_PART_MEGABYTES = 4000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--quick", action="store_true", help="few short blocks: form, not numbers")
    parser.add_argument("--gpu", action="store_true", help="on one GPU, instead of CPUs")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        run_worker(*json.loads(arguments.worker))
        return
    blocks, steps = (2, 5) if arguments.quick else (11, 60)
    models = MODELS[:1] if arguments.quick else (*MODELS, *(["resnet50"] if arguments.gpu else []))
    rows = [
        measure(topology, mode, model, drivers, blocks, steps)
        for topology, modes in (GPU_CASES if arguments.gpu else CASES).items()
        for model in models
        for mode, drivers in modes.items()
    ]
    if not arguments.gpu:
        blocks, seconds = (2, 0.1) if arguments.quick else (5, 4.0)
        rows += [
            measure(topology, mode, model, drivers, blocks, int(seconds / ahead_seconds(model)[1]))
            for cases, models in ((AHEAD_CASES, AHEAD), (COPIED_CASES, COPIED))
            for topology, modes in cases.items()
            for model in models[: 1 if arguments.quick else None]
            for mode, drivers in modes.items()
        ]
    times = ("step_milliseconds", "stock_step_milliseconds")
    print_table(rows, ["case", "mode", "step_time_ratio", "lowest_ratio", "highest_ratio", *times])
    write_report("overhead", rows, arguments.json, environment())


def measure(
    topology: str, mode: str, model: str, drivers: tuple[str, str], blocks: int, steps: int
) -> dict[str, Any]:
    """Run both drivers in turn and return one row."""
    groups = [Group(topology, driver, model) for driver in drivers]
    try:
        for group in groups:
            group.run(steps)  # Traces the step and warms up.
        times = [[group.run(steps) for group in groups] for _ in range(blocks)]
    finally:
        for group in groups:
            group.close()
    ratios = sorted(ours / stock for ours, stock in times)
    return {
        "case": f"{topology}_{model}",
        "mode": mode,
        "step_time_ratio": round(statistics.median(ratios), 4),
        "step_milliseconds": round(1e3 * statistics.median(ours for ours, _ in times), 3),
        "stock_step_milliseconds": round(1e3 * statistics.median(stock for _, stock in times), 3),
        "lowest_ratio": round(ratios[0], 4),
        "highest_ratio": round(ratios[-1], 4),
        "num_blocks": blocks,
        "steps_per_block": steps,
    }


class Group:
    """The processes of one strategy, which run a block of steps on request."""

    def __init__(self, topology: str, driver: str, model: str) -> None:
        num_processes = 2 if topology in ("two_processes", "two_workers_ahead") else 1
        ports = ReservedPorts(num_processes)
        ports.release()
        self._ports, addresses = ports, list(ports.addresses)
        self._processes = [
            _start(driver, model, topology, index, addresses) for index in range(num_processes)
        ]

    def run(self, steps: int) -> float:
        """Return the seconds per step of a block."""
        for process in self._processes:
            process.stdin.write(f"{steps}\n")
            process.stdin.flush()
        return max(self._read(process) for process in self._processes)

    def _read(self, process: subprocess.Popen[str]) -> float:
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"A benchmark process ended with exit code {process.wait()}.")
        return float(line)

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.wait()
        self._ports.close()


def _start(
    driver: str, model: str, topology: str, index: int, addresses: list[str]
) -> subprocess.Popen[str]:
    env = dict(os.environ, TF_CPP_MIN_LOG_LEVEL="3")
    if topology in AHEAD_CASES | COPIED_CASES:
        _, seconds, copying = ahead_seconds(model)
        if driver == "ours:copying_in_step":
            seconds += copying
        each = {"speed": 1, "fixed_seconds": seconds, "seconds_per_sample": 0.0}
        devices = [{**each, "asynchronous": True}] * (2 if topology in COPIED_CASES else 1)
        env["KERAS_HET_EMULATED_DEVICES"] = json.dumps(devices)
        env["KERAS_HET_PREFETCH"] = "1" if driver == "ours:copying_ahead" else "0"
    if len(addresses) > 1:
        task = {"type": "worker", "index": index}
        env["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": task})
    worker = json.dumps([driver, model, topology, index])
    return subprocess.Popen(
        [sys.executable, __file__, "--worker", worker],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def run_worker(driver: str, model_name: str, topology: str, index: int) -> None:
    """Run one process of a group: it reads numbers of steps, and answers with seconds per step."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Keras's output must not mix with the answers.
    import tensorflow as tf

    if topology == "two_processes" and hasattr(os, "sched_setaffinity"):
        cpus = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cpus[index % len(cpus)]})
    threads = 1 if topology == "two_processes" else 2
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2 * threads)
    if topology in ("two_devices", *COPIED_CASES):
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * 2
        )
    if topology in GPU_CASES:
        # Both drivers' processes live side by side on the one GPU.
        part = tf.config.LogicalDeviceConfiguration(memory_limit=GPU_PART_MEGABYTES)
        gpu = tf.config.list_physical_devices("GPU")[0]
        parts = [part] * (1 if topology == "one_gpu" else 2)
        tf.config.set_logical_device_configuration(gpu, parts)
    strategy_name, loop = driver.split(":")
    run_block = BLOCKS[loop](make_strategy(strategy_name), model_name)
    for line in sys.stdin:
        answers.write(f"{run_block(int(line))}\n")
        answers.flush()


def ahead_seconds(model: str) -> tuple[float, float, float]:
    """Seconds in which a host queues a step, its device computes it, and a batch is copied."""
    host, device, *copying = (float(part[1:]) / 1e3 for part in model.split("_"))
    return host, device, sum(copying)


def make_strategy(name: str) -> Any:
    import tensorflow as tf

    import keras_het

    if name == "ours":
        return keras_het.HeterogeneousStrategy()
    if name == "mirrored":
        kind = "GPU" if tf.config.list_logical_devices("GPU") else "CPU"
        cross_device = tf.distribute.ReductionToOneDevice() if kind == "GPU" else None
        return tf.distribute.MirroredStrategy([f"{kind}:0", f"{kind}:1"], cross_device)
    if name == "none":
        return None
    return tf.distribute.MultiWorkerMirroredStrategy()


def make_model(name: str) -> Any:
    import keras
    from keras import layers

    if name == "resnet50":
        return keras.applications.ResNet50(
            weights=None, input_shape=(128, 128, 3), classes=10, classifier_activation=None
        )
    if name in AHEAD + COPIED:
        host = ahead_seconds(name)[0]
        return keras.Sequential([keras.Input((64,)), make_pause(host)(), layers.Dense(10)])
    if name.startswith("dense"):
        units = int(name.partition("_")[2] or 128)
        return keras.Sequential(
            [
                keras.Input((64,)),
                layers.Dense(units, activation="relu"),
                layers.Dense(units, activation="relu"),
                layers.Dense(10),
            ]
        )
    return keras.Sequential(
        [
            keras.Input((32, 32, 3)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(128, 3, activation="relu"),
            layers.Flatten(),
            layers.Dense(400, activation="relu"),
            layers.Dense(10),
        ]
    )


def make_pause(seconds: float) -> Any:
    import keras
    import tensorflow as tf

    class Pause(keras.layers.Layer):
        """What a host does for a step, without using the CPU."""

        def call(self, inputs: Any) -> Any:
            def wait(values: Any) -> Any:
                time.sleep(seconds)
                return values

            waited = tf.numpy_function(wait, [inputs], tf.float32, stateful=False)
            waited.set_shape(inputs.shape)
            return tf.stop_gradient(waited)

    return Pause


def make_dataset(model: Any) -> Any:
    """Repeat one batch: reading data is the subject of benchmarks/data.py."""
    import numpy as np
    import tensorflow as tf

    rng = np.random.default_rng(0)
    x = rng.normal(size=(GLOBAL_BATCH, *model.input_shape[1:])).astype("float32")
    y = rng.integers(0, 10, GLOBAL_BATCH)
    return tf.data.Dataset.from_tensors((x, y)).repeat()


def balanced_fit_block(strategy: Any, model_name: str) -> Any:
    import keras_het

    return fit_block(strategy, model_name, [keras_het.callbacks.BatchBalancer()])


def telemetry_fit_block(strategy: Any, model_name: str) -> Any:
    import keras_het

    folder = tempfile.mkdtemp()
    return fit_block(strategy, model_name, [keras_het.callbacks.Telemetry(folder)])


def watched_fit_block(strategy: Any, model_name: str) -> Any:
    import keras_het

    callbacks = [keras_het.callbacks.BatchBalancer(), keras_het.callbacks.Telemetry()]
    return fit_block(strategy, model_name, callbacks)


def compiled_fit_block(strategy: Any, model_name: str) -> Any:
    return fit_block(strategy, model_name, jit_compile=True)


def fit_of_16_block(strategy: Any, model_name: str) -> Any:
    return fit_block(strategy, model_name, steps_per_execution=16)


def copying_ahead_block(strategy: Any, model_name: str) -> Any:
    """`fit` with copies that take time, one part of a batch after the other."""
    from keras_het.strategy.batches.uneven_per_replica import Placement

    place, seconds = Placement.__call__, ahead_seconds(model_name)[2]

    def place_slowly(placement: Any, parts: list[Any]) -> list[Any]:
        if any(not part[0].backing_device.endswith(f"CPU:{i}") for i, part in enumerate(parts)):
            time.sleep(seconds * len(parts))
        return place(placement, parts)

    Placement.__call__ = place_slowly
    return fit_block(strategy, model_name)


def fit_block(
    strategy: Any,
    model_name: str,
    callbacks: Sequence[Any] = (),
    steps_per_execution: int = 1,
    jit_compile: bool = False,
) -> Any:
    import keras

    from keras_het.strategy.measure import emulated_device

    class Clock(keras.callbacks.Callback):
        """Timer of all steps of an epoch except those of the first execution."""

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == steps_per_execution - 1:
                self.wait()
                self.start = time.perf_counter()
            self.steps = batch - steps_per_execution + 1

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.wait()
            self.seconds = (time.perf_counter() - self.start) / max(self.steps, 1)

        def wait(self) -> None:
            emulated_device.until_computed()()

    with strategy.scope() if strategy else contextlib.nullcontext():
        model = make_model(model_name)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        # Keras would compile with XLA on one device, and never does under a strategy.
        model.compile(
            keras.optimizers.Adam(1e-3),
            loss,
            metrics=["accuracy"],
            jit_compile=jit_compile,
            steps_per_execution=steps_per_execution,
        )
    dataset = make_dataset(model)

    def run_block(steps: int) -> float:
        clock = Clock()
        model.fit(
            dataset,
            steps_per_epoch=steps + steps_per_execution,
            verbose=0,
            callbacks=[*callbacks, clock],
            shuffle=False,
        )
        return clock.seconds

    return run_block


def loop_block(strategy: Any, model_name: str) -> Any:
    import keras
    import tensorflow as tf

    with strategy.scope():
        model = make_model(model_name)
        loss_function = keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction="none"
        )
        optimizer = keras.optimizers.Adam(1e-3)
        accuracy = keras.metrics.SparseCategoricalAccuracy()

    def replica_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss = tf.nn.compute_average_loss(
                loss_function(y, logits), global_batch_size=GLOBAL_BATCH
            )
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        accuracy.update_state(y, logits)
        return loss

    @tf.function
    def train_step(x: Any, y: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(replica_step, args=(x, y)), axis=None)

    batches = iter(strategy.experimental_distribute_dataset(make_dataset(model)))

    def run_block(steps: int) -> float:
        train_step(*next(batches))
        start = time.perf_counter()
        for _ in range(steps):
            loss = train_step(*next(batches))
        loss.numpy()
        return (time.perf_counter() - start) / steps

    return run_block


BLOCKS = {
    "fit": fit_block,
    "fit_of_16": fit_of_16_block,
    "compiled_fit": compiled_fit_block,
    "balanced_fit": balanced_fit_block,
    "telemetry_fit": telemetry_fit_block,
    "watched_fit": watched_fit_block,
    "copying_ahead": copying_ahead_block,
    "copying_in_step": fit_block,
    "loop": loop_block,
}


if __name__ == "__main__":
    main()
