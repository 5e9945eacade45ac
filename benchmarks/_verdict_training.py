"""Real trainings with faults, recorded by Telemetry and diagnosed every few steps of them.

As a script, it is one of two workers. The second one's input or CPU quota fails, or something of
both; for a link, the first one tells the process that started it how much of the fault there should
be.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import psutil
import tensorflow as tf
from _verdict_faults import EVERY, Training

import keras_het
from keras_het.planning.diagnosis.recording import Recording
from keras_het.planning.diagnosis.verdict import diagnose
from keras_het.strategy.measure import emulated_device

STEP_SECONDS = 0.025  # of an emulated device
BATCH = 12
SLOWER = 1.0  # times that a slow device takes longer
INPUT_SECONDS = 0.06  # that each batch takes in a slow pipeline
CALLBACK_SECONDS = 0.06  # that a callback takes after each batch
BUSY_PROGRAMS = 2  # for each CPU
LOST_CPUS = 0.6  # of one that a quota leaves
# of the network that really computes, about 25 ms of a core
COMPUTED_ROWS, WIDTH, LAYERS = 8192, 192, 3
# 0.4 MB of gradients, 3 ms on a link of 1000 Mbit/s
SENT_WIDTH = 320

QUIET_CPUS = 0.25

Apply = Callable[[float], None]


def train(
    strategy: Any, training: Training, apply: Apply, logs: Path | None, patience: float
) -> dict[str, Any]:
    """Train, and return what the verdict would have said in the course of it.

    Args:
        strategy: the strategy.
        training: what is trained, and how it fails.
        apply: sets how much of the fault there is from now on, between 0 and 1.
        logs: directory of the telemetry's log, None for none.
        patience: seconds that the chief waits at most for other programs to end.
    """
    if strategy.is_chief:
        wait_for_quiet(patience)
    data = data_of(training)
    model = model_of(strategy, training)
    telemetry = keras_het.callbacks.Telemetry(logs)
    with busy_machine(training.busy and strategy.is_chief):
        model.fit(data, verbose=0, callbacks=[telemetry, Injector(training, apply)])
    recording = telemetry.recording()
    return {
        # The parts of a step travel with the next one: of the latest step nothing is known.
        "said": [
            {"step": step, **said(recording.between(0, step - 1))}
            for step in range(EVERY, training.steps + 1, EVERY)
        ],
        "step_milliseconds": round(1e3 * float(np.nanmedian(recording.wall)), 2),
        "other_cpus": cpus_of_others(recording),
    }


def wait_for_quiet(patience: float) -> None:
    """Wait until other programs leave the machine alone, for a limited time."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        if psutil.cpu_percent(1.0) * psutil.cpu_count() / 100 < QUIET_CPUS:
            return


@contextlib.contextmanager
def busy_machine(is_busy: bool) -> Iterator[None]:
    """Keep all CPUs busy with other programs meanwhile."""
    number = BUSY_PROGRAMS * (os.cpu_count() or 1) if is_busy else 0
    programs = [subprocess.Popen([sys.executable, "-c", "while 1: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def cpus_of_others(recording: Recording) -> float | None:
    """Return how many CPUs of the machine other programs have used in the mean."""
    # The second worker may see no more than its cgroup.
    busy = np.nanmean(recording.hardware["system.cpu.utilization"][1:, 0]) * psutil.cpu_count()
    usage = np.nanmean(recording.hardware["process.cpu.usage"][1:], axis=0)
    workers = {device.worker: used for device, used in zip(recording.devices, usage, strict=True)}
    others = float(busy - sum(workers.values()))
    return round(max(others, 0.0), 2) if np.isfinite(others) else None


def said(recording: Recording) -> dict[str, Any]:
    """Return the first cause of the verdict on a recording."""
    verdict = diagnose(recording)
    if not verdict.causes:
        text = " ".join([*verdict.lines, *verdict.missing])
        return {"kind": "", "device": None, "worker": None, "text": text}
    first = verdict.causes[0]
    return {"kind": first.kind, "device": first.device, "worker": first.worker, "text": first.text}


class Injector(keras.callbacks.Callback):
    """Sets how much of a fault there is, before each step in which that changes."""

    def __init__(self, training: Training, apply: Apply) -> None:
        super().__init__()
        self._training, self._apply = training, apply
        self._strength = 0.0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        strength = self._training.strength(batch)
        if strength != self._strength:
            self._strength = strength
            self._apply(strength)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        time.sleep(Slow.callback_seconds)

    def on_train_end(self, logs: Any = None) -> None:
        self._apply(0.0)


def model_of(strategy: Any, training: Training) -> keras.Model:
    """Return a new model: it computes, waits as long as a device would compute, or sends much."""
    from telemetry import Sleep

    kind = training.kind
    with strategy.scope():
        if kind == "host":
            inputs = outputs = keras.Input((WIDTH,))
            for _ in range(LAYERS):
                outputs = keras.layers.Dense(WIDTH, activation="relu")(outputs)
        elif kind == "link":
            inputs = keras.Input((SENT_WIDTH,))
            outputs = keras.layers.Dense(SENT_WIDTH)(inputs)
        elif training.processes > 1:
            inputs = keras.Input((8,))
            Slow.layer = Sleep(STEP_SECONDS)
            outputs = Slow.layer(inputs)
        else:
            inputs = outputs = keras.Input((8,))
        model = keras.Model(inputs, keras.layers.Dense(1)(outputs))
        model.compile("sgd", "mse")
    return model


def data_of(training: Training) -> tf.data.Dataset:
    """Return the global batches of a training."""
    rows = COMPUTED_ROWS if training.kind == "host" else BATCH
    width = {"host": WIDTH, "link": SENT_WIDTH}.get(training.kind, 8)
    batch = tf.zeros([rows, width]), tf.zeros([rows, 1])
    data = tf.data.Dataset.from_tensors(batch).repeat(training.steps)
    return data.map(slowly, num_parallel_calls=1) if training.kind.endswith("input") else data


class Slow:
    """How long parts of a step take now.

    Attributes:
        map_seconds: the map, for each batch.
        callback_seconds: a callback, after each batch.
        layer: the one that waits in place of a device, if there is one.
    """

    map_seconds = 0.0
    callback_seconds = 0.0
    layer: Any = None


def slowly(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return a batch, later."""

    def wait(values: Any) -> Any:
        time.sleep(Slow.map_seconds)
        return values

    waited = tf.numpy_function(wait, [x], tf.float32)
    waited.set_shape(x.shape)
    return waited, y


def slow_device(strength: float) -> None:
    """Slow the last of three emulated devices of this process."""
    emulated_device.slow_down(2, 1.0 + SLOWER * strength)


def slow_input(strength: float) -> None:
    """Slow the input pipeline of this process."""
    Slow.map_seconds = INPUT_SECONDS * strength


def slow_callback(strength: float) -> None:
    """Slow a callback of this process."""
    Slow.callback_seconds = CALLBACK_SECONDS * strength


def slow_compute(strength: float) -> None:
    """Slow all devices of this process."""
    if Slow.layer is None:
        for device in range(3):
            emulated_device.slow_down(device, 1.0 + SLOWER * strength)
    else:
        Slow.layer._seconds = STEP_SECONDS * (1.0 + SLOWER * strength)


def quota_of(group: Path) -> Apply:
    """Return what takes CPU time from a cgroup."""
    period_file = group / "cpu.cfs_period_us"
    version_1 = period_file.exists()
    period = int((period_file if version_1 else group / "cpu.max").read_text().split()[-1])

    def apply(strength: float) -> None:
        microseconds = int(period * (1.0 - LOST_CPUS * strength))
        if version_1:
            (group / "cpu.cfs_quota_us").write_text(str(microseconds if strength else -1))
        else:
            (group / "cpu.max").write_text(f"{microseconds if strength else 'max'} {period}")

    return apply


OF_ALL: dict[str, Apply] = {
    "all input": slow_input,
    "all callbacks": slow_callback,
    "all compute": slow_compute,
}


def nothing(strength: float) -> None:
    """Leave everything as it is."""


def worker() -> None:
    """Run one of the two workers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--trainings", required=True, help="JSON")
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--strength", type=Path, help="file that tells how much of a fault")
    parser.add_argument("--groups", type=Path, nargs=2, help="cgroup of each worker")
    parser.add_argument("--logs", type=Path)
    parser.add_argument("--patience", type=float, default=0.0)
    options = parser.parse_args()
    index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    faults: dict[str, Apply] = {"input": slow_input, "link": nothing, "host": nothing}
    if options.groups:
        (options.groups[index] / "cgroup.procs").write_text(str(os.getpid()))
        faults["host"] = quota_of(options.groups[index])
        faults["host"](0.0)
    if index == 0:
        faults = dict.fromkeys(faults, nothing)
        if options.strength:
            faults["link"] = lambda strength: tell(options.strength, strength)
    faults |= OF_ALL
    strategy = keras_het.HeterogeneousStrategy()
    results = []
    for number, given in enumerate(json.loads(options.trainings)):
        training = Training(**given)
        logs = options.logs / f"{number} {training.case}" if options.logs else None
        results.append(train(strategy, training, faults[training.kind], logs, options.patience))
        print(training.case, "done", flush=True)
    if strategy.is_chief:
        options.results.write_text(json.dumps(results))


def tell(path: Path, strength: float) -> None:
    """Write a number so that nobody reads half of it."""
    new = path.with_suffix(".new")
    new.write_text(str(strength))
    new.replace(path)


def arguments_of(given: list[Training], results: Path, *more: str) -> list[str]:
    """Return the command of a worker."""
    text = json.dumps([dataclasses.asdict(training) for training in given])
    script = str(Path(__file__).resolve())
    return [sys.executable, script, "--trainings", text, "--results", str(results), *more]


if __name__ == "__main__":
    worker()
