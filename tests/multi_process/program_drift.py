"""Program: trains while a weight of worker 1 changes by itself, and keeps what is told of it.

Arguments: folder of the results; number of devices of each worker, separated by commas; names of
the cases.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from own_devices import split_devices

import keras_het
from keras_het.callbacks import LocalTraining

# How `fit` differs, what changes on worker 1 (weight of the model, variable of the optimizer), and
# on which of its replicas.
CASES: dict[str, tuple[str, Any]] = {
    "equal": ("warn", None),
    "a weight": ("warn", (lambda model: model.weights[0], (0, 1))),
    "of the optimizer": ("warn", (lambda model: model.optimizer.variables[2], (1,))),
    "copied": ("copy", (lambda model: model.weights[0], (0, 1))),
    "ignored": ("ignore", (lambda model: model.weights[0], (0, 1))),
    "local training": ("warn", None),
    "within a local one": ("copy", (lambda model: model.optimizer.variables[2], (1,))),
}


class Change(keras.callbacks.Callback):
    """Changes a variable of worker 1 after the first epoch."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self._change = change

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        strategy = self.model.distribute_strategy
        if self._change is None or epoch or strategy.worker_index != 1:
            return
        find, replicas = self._change
        copies = strategy.experimental_local_results(find(self.model).value)
        for replica in replicas[: len(copies)]:
            copies[replica].assign_add(tf.fill(copies[replica].shape, 1e-3))


def trained(strategy: Any, name: str, told: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Messages, and what this worker's replicas hold, float64 [replicas, elements]."""
    strategy.extended.on_drift, change = CASES[name]
    keras.utils.set_random_seed(2)
    with strategy.scope():
        layers = [keras.Input((4,)), keras.layers.Dense(3), keras.layers.BatchNormalization()]
        model = keras.Sequential([*layers, keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    callbacks = [Change(change)]
    if "local" in name:
        callbacks.append(LocalTraining("diloco", period=2))
    x = np.random.default_rng(5).normal(size=(24, 4)).astype("float32")
    told.clear()
    model.fit(x, x[:, :1], batch_size=8, epochs=2, verbose=0, callbacks=callbacks)
    held = [*model.weights, *model.optimizer.variables]
    local = [strategy.experimental_local_results(variable.value) for variable in held]
    rows = [
        np.concatenate([np.asarray(v).ravel() for v in each]) for each in zip(*local, strict=True)
    ]
    messages = [each for each in told if each.startswith("Replicas that must")]
    return np.array(messages or [""]), np.array(rows)


def main() -> None:
    _, own = split_devices(sys.argv[2])
    strategy = keras_het.HeterogeneousStrategy([f"CPU:{index}" for index in range(own)])
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("keras_het").addHandler(handler)
    found: dict[str, np.ndarray] = {}
    for name in sys.argv[3:]:
        found[name], found[f"{name}, replicas"] = trained(strategy, name, told)
    np.savez(Path(sys.argv[1]) / f"{strategy.worker_index}.npz", **found)


main()
