"""Program: trains with local steps and writes weights and center after every step.

Arguments: folder for the results; JSON of the cases: name to options ("rule", "shares", "epochs",
"steps_per_execution", "jit_compile", "momentum", "rate", "normalized", "backup", "save_freq",
"stop_at", "waits", "trains_again", "balancer", "dies").
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from recording import batches, counted_compilations

import keras_het
from keras_het.callbacks import LocalTraining
from keras_het.strategy.hierarchical_all_reduce import HierarchicalAllReduce

SAMPLES, BATCH = 44, 8  # 5 whole batches and one of 4


def make_model(options: dict[str, Any]) -> Any:
    layers = [keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)]
    if options.get("normalized"):
        layers.insert(0, keras.layers.BatchNormalization(momentum=0.8, center=False, scale=False))
    model = keras.Sequential([keras.Input((5,)), *layers])
    rate, momentum = options.get("rate", 0.1), options.get("momentum", 0.0)
    model.compile(
        keras.optimizers.SGD(rate, momentum=momentum),
        "mse",
        metrics=["mae"],
        steps_per_execution=options.get("steps_per_execution", 1),
        jit_compile=options.get("jit_compile", "auto"),
    )
    return model


class Notes(keras.callbacks.Callback):
    def __init__(self, local: Any) -> None:
        super().__init__()
        self.local = local
        self.results: dict[str, Any] = {}
        self.steps = 0
        self.samples: list[int] = []

    def get_state(self) -> None:
        """Each process notes its own steps."""

    def set_state(self, state: None) -> None:
        pass

    def on_train_begin(self, logs: Any = None) -> None:
        self._keep("start", self.model.get_weights())

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps += 1
        self._keep(f"step_{self.steps}", self.model.get_weights())
        self.samples.append(self.model.distribute_strategy.local_samples_delivered)
        self.local._exchange.wait()
        self._keep(f"center_{self.steps}", [np.array(self.local._exchange.center)])
        self.results["exchanges"] = np.array(self.local._exchange.num_exchanges)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._keep(f"epoch_{epoch}", self.model.get_weights())
        for name, value in logs.items():
            self.results[f"log_{epoch}/{name}"] = np.array(value)

    def on_train_end(self, logs: Any = None) -> None:
        self._keep("end", self.model.get_weights())

    def _keep(self, name: str, values: list[Any]) -> None:
        for position, value in enumerate(values):
            self.results[f"{name}/{position}"] = np.array(value)


class Waits(keras.callbacks.Callback):
    """Worker 1 takes its first step only when worker 0 has taken its second to last before an
    exchange: a collective in a local step would stop both for ever."""

    def __init__(self, folder: Path, steps: int) -> None:
        super().__init__()
        self._mark, self._steps = folder / "ahead", steps

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        # the first step of each is traced, and begins with a comparison of the data's order
        if self.model.distribute_strategy.is_chief:
            if batch == self._steps:
                self._mark.touch()
            return
        deadline, never = time.monotonic() + 60, threading.Event()
        while batch == 1 and not self._mark.exists():
            if time.monotonic() > deadline:
                raise TimeoutError("worker 0 does not go ahead")
            never.wait(0.01)


class Interruption(keras.callbacks.Callback):
    def __init__(self, step: int, dies: bool = False) -> None:
        super().__init__()
        self._left, self._dies = step, dies

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._left -= 1
        if self._left == 0 and not self._dies:
            raise InterruptedError("the power went out")
        if self._left == 0 and not self.model.distribute_strategy.is_chief:
            os.kill(os.getpid(), signal.SIGKILL)


class Collectives(keras.callbacks.Callback):
    """Counts the sums between workers that are traced in the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.in_first_step: int | None = None
        self._traced = 0
        original = HierarchicalAllReduce._all_reduce_by_type

        def count(operations: Any, *args: Any) -> Any:
            self._traced += 1
            return original(operations, *args)

        HierarchicalAllReduce._all_reduce_by_type = count

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._before = self._traced

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.in_first_step is None:
            self.in_first_step = self._traced - self._before


def run(strategy: Any, folder: Path, name: str, options: dict[str, Any]) -> None:
    strategy.set_share_weights(options.get("shares", [1.0] * strategy.num_replicas_in_sync))
    keras.utils.set_random_seed(7)
    with strategy.scope():
        model = make_model(options)
    local = LocalTraining(options["rule"])
    notes = Notes(local)
    counts = {"local": Collectives(), "global": Collectives()}
    callbacks: list[Any] = [local]
    if options.get("backup"):
        frequency = options.get("save_freq", "epoch")
        callbacks.append(keras_het.callbacks.BackupAndRestore(options["backup"], frequency))
    callbacks += [counts["local"], notes]
    if place := options.get("balancer"):
        at = 0 if place == "before" else len(callbacks)
        callbacks.insert(at, keras_het.callbacks.BatchBalancer())
    if options.get("waits"):
        callbacks.append(Waits(folder, options["waits"]))
    if options.get("stop_at"):
        callbacks.append(Interruption(options["stop_at"], options.get("dies", False)))
    data = batches(SAMPLES, BATCH)
    epochs, validation_data = options.get("epochs", 2), batches(15, 6)
    given = {"validation_data": validation_data, "verbose": 0, "callbacks": callbacks}
    results: dict[str, Any] = {}
    try:
        with counted_compilations() as compilations:
            history = model.fit(data, epochs=epochs, **given)
    except InterruptedError:
        pass
    except ValueError as error:
        results["error"] = np.array(str(error))
    else:
        results = notes.results
        results["compiled"] = np.array(compilations["MatMul"])
        results["evaluate"] = np.array(model.evaluate(validation_data, verbose=0))
        results["samples"] = np.diff([0, *notes.samples])
        for key, values in history.history.items():
            results[f"history/{key}"] = np.array(values)
    if options.get("trains_again"):
        model.fit(data, epochs=1, verbose=0, callbacks=[counts["global"]])
        results["again"] = np.concatenate([weight.ravel() for weight in model.get_weights()])
        for key, count in counts.items():
            results[f"collectives/{key}"] = np.array(count.in_first_step)
    if results:
        np.savez(folder / f"{name}-{strategy.worker_index}.npz", **results)


def main() -> None:
    folder, cases = Path(sys.argv[1]), json.loads(sys.argv[2])
    devices = [int(count) for count in (sys.argv[3:] or ["1,1"])[0].split(",")]
    index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    cpu = tf.config.list_physical_devices("CPU")[0]
    logical = [tf.config.LogicalDeviceConfiguration()] * devices[index]
    tf.config.set_logical_device_configuration(cpu, logical)
    strategy = keras_het.HeterogeneousStrategy(
        devices=[f"CPU:{number}" for number in range(devices[index])]
    )
    for name, options in cases.items():
        faulthandler.dump_traceback_later(100, exit=True)
        run(strategy, folder, name, options)
    faulthandler.cancel_dump_traceback_later()


main()
