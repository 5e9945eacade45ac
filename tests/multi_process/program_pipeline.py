"""Program: trains models in a pipeline on two logical devices of each worker, or on one device.

Arguments: folder of the results; names of the checks, each a model and a layout of its stages.
Without a cluster it trains each model on one device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import tensorflow as tf
from pipeline_models import MODELS
from pipeline_optimizers import normalizing, perceptron, rows
from pipeline_training import Outcome, floatx, plan_of, train
from recording import run_each

import keras_het
from keras_het.strategy.pipeline.model_units import ModelUnits

IS_CLUSTER = "TF_CONFIG" in os.environ
DEVICES = ("CPU:0", "CPU:1")
# Devices of each stage: 0 and 1 are those of worker 0, 2 and 3 those of worker 1.
MODELS.update(
    accumulation=(
        functools.partial(perceptron, "accumulation", True),
        functools.partial(rows, True),
    ),
    averages=(functools.partial(perceptron, "averages"), rows),
    half=(functools.partial(perceptron, "clipnorm"), rows),
    overflow=(functools.partial(perceptron, None), rows),
    callbacks=MODELS["masked"],
    normalizing=(normalizing, rows),
    again=(functools.partial(perceptron, "clipnorm"), rows),
)
# micro-batches are normalized and dropped by themselves: not as on one device
IN_PIPELINE = ("normalizing",)
IN_FLOAT32 = {"half": "mixed_float16", "overflow": "float32"}
REPLICAS: dict[str, list[list[int]]] = {
    "three stages": [[0], [2], [1]],
    "replicas": [[3, 1], [0, 2]],
    "data parallelism": [[0, 1, 2, 3]],
    "idle worker": [[0], [1]],
    "idle chief": [[3], [2]],
    "recomputed": [[2], [1, 3]],
    "head": [[0], [1], [0], [2]],
    "three workers": [[0, 4], [2], [5, 3]],
}
ROUTES = {1: (0, 0, 0, 0), 2: (0, 1, 1, 0), 4: (2, 0, 1, 3)}
EPOCHS = 1


def plan_for(model: str, layout: str) -> Any:
    """Stages with about as many layer calls each."""
    units = ModelUnits(MODELS[model][0]())
    end = len(units.units)
    cuts = [c for c in range(1, end) if not any(a < c <= b for a, b in units.together)]
    replicas = REPLICAS[layout]
    if layout == "head":  # the last stage has no weights
        return plan_of([0, 2, end - 3, end - 1, end], replicas, [ROUTES[1]] * 4)
    inner = [cuts[len(cuts) * i // len(replicas)] for i in range(1, len(replicas))]
    recomputed = [range(inner[0])] if layout == "recomputed" else []
    routes = [ROUTES[len(devices)] for devices in replicas]
    return plan_of([0, *inner, end], replicas, routes, recomputed=recomputed)


class Sees(keras.callbacks.Callback):
    """What a callback finds at the end of each epoch, and in what the chief has saved."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self.found: list[np.ndarray] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.save_weights(self._path)
        self.found += map(keras.ops.convert_to_numpy, self.model.weights)
        self.found += map(keras.ops.convert_to_numpy, self.model.optimizer.variables)


def kept(outcome: Outcome) -> dict[str, Any]:
    """All of an outcome, by name."""
    found = {f"weight {i}": value for i, value in enumerate(outcome.weights)}
    found |= {f"optimizer {i}": value for i, value in enumerate(outcome.optimizer)}
    found |= {f"history {key}": np.array(values) for key, values in outcome.history.items()}
    found["evaluation"] = np.array(outcome.evaluation)
    predictions = keras.tree.flatten(outcome.predictions)
    return found | {f"prediction {i}": value for i, value in enumerate(predictions)}


def run(name: str, folder: Path, strategy: Any) -> dict[str, Any]:
    """Train, and return what the test compares."""
    model, _, layout = name.partition("/")
    build, data = MODELS[model]
    if strategy is not None:
        plan = None
        if layout != "measured":
            with tf.distribute.OneDeviceStrategy("CPU:0").scope():
                plan = plan_for(model, layout)
        # a process joins a cluster once: one strategy has the plans of all checks
        strategy._request = dataclasses.replace(strategy._request, plan=plan)
    at_ends = folder / f"{name.replace('/', '-')}.weights.h5"
    if strategy is None and model in IN_PIPELINE:
        strategy = keras_het.PipelineStrategy(
            plan=plan_for(model, "three stages"), num_micro_batches=4
        )
    sees = Sees(at_ends)
    options: dict[str, Any] = {"epochs": EPOCHS, "callbacks": [sees]}
    if model == "callbacks":
        options = {"epochs": 5, "callbacks": [*callbacks_that_save(at_ends)]}
    outcome = train(build, data(), strategy, **options)
    found = kept(outcome) | {f"at epoch ends {i}": value for i, value in enumerate(sees.found)}
    trained = outcome.model
    if model == "callbacks":
        x, y, _ = data()
        trained.train_on_batch(x[:9], y[:9])
        trained.save_weights(at_ends.with_name(f"{at_ends.name}-last.weights.h5"))
    if model == "again":
        found |= train_again(trained, data)
    if strategy is None or strategy.is_chief:
        for path in sorted(at_ends.parent.glob(f"{at_ends.name}*")):
            with h5py.File(path) as file:
                file.visititems(functools.partial(_note, found, path.name.split(".h5")[-1]))
    return found


class Fails(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 1:
            raise InterruptedError("within an epoch")


def train_again(model: keras.Model, data: Any) -> dict[str, Any]:
    """Train after a failure, and after another compilation: a loss of other messages."""
    x, y, _ = data()
    options: dict[str, Any] = {"batch_size": 12, "verbose": 0, "shuffle": False}
    with contextlib.suppress(InterruptedError):
        model.fit(x, y, **options, callbacks=[Fails()])
    histories = [model.fit(x, y, **options).history]
    model.layers[1].trainable = False
    loss = lambda y, found: keras.ops.var(found - y)  # noqa: E731
    model.compile(keras.optimizers.Adam(0.01, global_clipnorm=0.1), loss, jit_compile=False)
    histories.append(model.fit(x, y, **options).history)
    model.set_weights([weight / 2 for weight in model.get_weights()])
    histories.append(model.fit(x, y, **options).history)
    values = [*model.variables, *model.optimizer.variables]
    found = {f"again {i}": keras.ops.convert_to_numpy(value) for i, value in enumerate(values)}
    return found | {f"history {i}": each["loss"] for i, each in enumerate(histories)}


def callbacks_that_save(path: Path) -> list[keras.callbacks.Callback]:
    """They save within an epoch, and stop after the second with the weights of the first."""
    each = f"{path}-{{epoch}}-{{batch}}.weights.h5"
    return [
        keras.callbacks.ModelCheckpoint(each, save_weights_only=True, save_freq=3),
        keras.callbacks.EarlyStopping("loss", mode="max", restore_best_weights=True),
    ]


def _note(found: dict[str, Any], path: str, name: str, item: Any) -> None:
    if isinstance(item, h5py.Dataset):
        found[f"saved {path} {name}"] = item[()]


def run_in_floats(name: str, folder: Path, strategy: Any) -> dict[str, Any]:
    in_float32 = IN_FLOAT32.get(name.partition("/")[0])
    with floatx("float32" if in_float32 else "float64"):
        keras.config.set_dtype_policy(in_float32 or "float64")
        return run(name, folder, strategy)


def main() -> None:
    folder, *names = sys.argv[1:]
    cpu = tf.config.list_physical_devices("CPU")[0]
    logical = [tf.config.LogicalDeviceConfiguration()] * (2 if IS_CLUSTER else 4)
    tf.config.set_logical_device_configuration(cpu, logical)
    if not IS_CLUSTER:
        names = list(dict.fromkeys(name.partition("/")[0] for name in names))
    strategy = keras_het.PipelineStrategy(None, 4, DEVICES) if IS_CLUSTER else None
    task = "single" if strategy is None else f"worker_{strategy.worker_index}"
    run_each(names, lambda name: run_in_floats(name, Path(folder), strategy), Path(folder), task)


main()
