"""The program that trains one model on some devices, and prints how fast it is."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_het import private_api
from keras_het.launch.benchmark.copies import copies_to_host, steps_of
from keras_het.launch.benchmark.models import MODELS, endless_batches
from keras_het.launch.doctor.tensorflow_facts import say

_MIB = 2**20


class Stopwatch(keras.callbacks.Callback):
    """Time of the steps after a warm-up, until the last one is computed; then training ends."""

    def __init__(self, warm_up_seconds: float, seconds: float) -> None:
        super().__init__()
        self._warm_up_seconds, self._seconds = warm_up_seconds, seconds
        self._began = self.steps = self.seconds = 0.0
        self._is_warm = False
        self.copies: list[int] = []

    def on_train_begin(self, logs: Mapping[str, float] | None = None) -> None:
        """Look at the functions that the warm-up runs."""
        private_api.start_collecting_graphs()

    def on_train_batch_end(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Start after the warm-up, and stop after the measured time."""
        now = time.perf_counter()
        if self._began == 0:  # the first step traces and compiles
            self._began = now
        if not self._is_warm and now - self._began >= self._warm_up_seconds:
            self._wait()
            steps = steps_of(private_api.stop_collecting_graphs())
            self.copies = sorted({len(copies_to_host([step])) for step in steps})
            self._is_warm, self._began, self.steps = True, time.perf_counter(), 0
            return
        self.steps += 1
        if self._is_warm and now - self._began >= self._seconds:
            self._wait()
            self.seconds = time.perf_counter() - self._began
            self.model.stop_training = True

    def _wait(self) -> None:
        """Wait for the update of the latest step, which a device may still compute."""
        np.array(self.model.optimizer.iterations)


def make_strategy(request: Mapping[str, Any]) -> Any:
    """Return the strategy of a trial, none for plain Keras."""
    if request["mode"] == "plain":
        return None
    import keras_het

    options: dict[str, Any] = {}
    if request["mode"] == "copies":
        experimental = tf.distribute.experimental
        ring = experimental.CommunicationImplementation.RING
        options["communication_options"] = experimental.CommunicationOptions(implementation=ring)
    return keras_het.HeterogeneousStrategy(devices=request["devices"], **options)


def run(request: Mapping[str, Any]) -> dict[str, Any]:
    """Train, and return samples per second, time of a step, shares and peak memory."""
    if request["is_emulated"]:
        cpu = tf.config.list_physical_devices("CPU")[0]
        # CPU:0 is their host
        parts = [tf.config.LogicalDeviceConfiguration()] * (1 + len(request["devices"]))
        tf.config.set_logical_device_configuration(cpu, parts)
    keras.utils.set_random_seed(0)
    if request["precision"] != "float32":
        keras.config.set_dtype_policy(request["precision"])
    strategy = make_strategy(request)
    stopwatch = Stopwatch(request["warm_up_seconds"], request["seconds"])
    callbacks: list[keras.callbacks.Callback] = [stopwatch]
    if request["mode"] in ("balanced", "copies"):
        from keras_het.callbacks import BatchBalancer

        callbacks.insert(0, BatchBalancer())
    with strategy.scope() if strategy else tf.device(None):
        model = MODELS[request["model"]](request["is_emulated"])
        model.compile("adam", "sparse_categorical_crossentropy")
    data = endless_batches(model, request["batch_size"])
    # an emulated device takes what nobody has placed, as a GPU does
    with tf.device(request["devices"][0] if request["is_emulated"] else None):
        model.fit(data, steps_per_epoch=10**9, epochs=1, verbose=0, callbacks=callbacks)
    return {
        "samples_per_second": stopwatch.steps * request["batch_size"] / stopwatch.seconds,
        "step_seconds": stopwatch.seconds / stopwatch.steps,
        "steps": stopwatch.steps,
        "copies_per_step": stopwatch.copies,
        "shares": list(strategy.current_shares) if strategy else [request["batch_size"]],
        "peak_mib": [
            round(tf.config.experimental.get_memory_info(name)["peak"] / _MIB)
            for name in ([] if request["is_emulated"] else request["devices"])
        ],
        "xla": bool(model.jit_compile),
    }


if __name__ == "__main__":
    say(run(json.load(sys.stdin)))
