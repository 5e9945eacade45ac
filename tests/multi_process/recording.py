"""What a check of the exactness program sees and keeps: runs on every worker and on one device."""

from __future__ import annotations

import contextlib
import faulthandler
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from recorded import arrays

from keras_het import private_api

LONGEST_CHECK_SECONDS = 100
CHECKS: dict[str, Callable[[Recording], None]] = {}


def check(function: Callable[[Recording], None]) -> Callable[[Recording], None]:
    """Decorator: makes a function known to `program_exactness.py` by its name."""
    CHECKS[function.__name__] = function
    return function


class StepLogs(keras.callbacks.Callback):
    """Keeps the logs of every training step."""

    def __init__(self) -> None:
        super().__init__()
        self.logs: list[dict[str, Any]] = []

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self.logs.append({"batch": batch, **(logs or {})})


class Recording:
    """Runs one check, with a strategy or on one device, and collects its results.

    Args:
        strategy: the `HeterogeneousStrategy`, or None for one device.
    """

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy
        self.results: dict[str, np.ndarray] = {}

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        with contextlib.nullcontext() if self.strategy is None else self.strategy.scope():
            yield

    def set_share_weights(self, shares: Sequence[float]) -> None:
        """Gives replicas beyond those of the check the share 1."""
        if self.strategy is not None:
            more = self.strategy.num_replicas_in_sync - len(shares)
            self.strategy.set_share_weights([*shares, *[1] * more])

    def keep(self, name: str, structure: Any) -> None:
        """Keeps all leaves of a structure."""
        leaves = keras.tree.flatten(structure)
        for position, leaf in enumerate(leaves):
            key = name if len(leaves) == 1 else f"{name}/{position}"
            self.results[key] = np.array(leaf)

    def keep_model(self, model: Any, prefix: str = "") -> None:
        for position, variable in enumerate(model.weights):
            self.keep(f"{prefix}weight_{position}", variable)
        for position, variable in enumerate(model.optimizer.variables):
            self.keep(f"{prefix}optimizer_{position}", variable)
        if hasattr(model.optimizer, "inner_optimizer"):
            for position, variable in enumerate(model.optimizer.inner_optimizer.variables):
                self.keep(f"{prefix}inner_optimizer_{position}", variable)

    def build(self, make_model: Callable[[], Any]) -> Any:
        keras.utils.set_random_seed(7)
        with self.scope():
            return make_model()

    def fit(self, model: Any, *arguments: Any, prefix: str = "", **options: Any) -> None:
        """Trains and keeps the logs of all steps, the History, weights and optimizer state."""
        steps = StepLogs()
        callbacks = [steps, *options.pop("callbacks", [])]
        history = model.fit(
            *arguments, **{"epochs": 2, "verbose": 0, **options}, callbacks=callbacks
        )
        for position, logs in enumerate(steps.logs):
            for key, value in logs.items():
                self.keep(f"{prefix}step_{position}/{key}", value)
        for key, values in history.history.items():
            self.keep(f"{prefix}history/{key}", np.array(values))
        self.keep_model(model, prefix)


def batches(samples: int = 22, size: int = 8) -> tf.data.Dataset:
    """Global batches; the last one is partial (22 = 8 + 8 + 6)."""
    return tf.data.Dataset.from_tensor_slices(arrays(samples)).batch(size)


def small_model(optimizer: Any, *hidden: Any, **compile_options: Any) -> Any:
    layers = hidden or (keras.layers.Dense(4, activation="tanh"),)
    model = keras.Sequential([keras.Input((5,)), *layers, keras.layers.Dense(1)])
    model.compile(optimizer, **{"loss": "mse", "metrics": ["mae"], **compile_options})
    return model


@contextlib.contextmanager
def in_buckets(run: Recording) -> Iterator[None]:
    if run.strategy is not None:
        run.strategy.extended.bytes_per_bucket = 1
    try:
        yield
    finally:
        if run.strategy is not None:
            run.strategy.extended.bytes_per_bucket = 0


@contextlib.contextmanager
def in_parts(run: Recording, *sizes: int) -> Iterator[None]:
    """Replicas beyond those of the check compute one sample at a time."""
    if run.strategy is None:
        yield
        return
    more = run.strategy.num_replicas_in_sync - len(sizes)
    extended = run.strategy.extended
    before, extended.micro_batch_sizes = extended.micro_batch_sizes, [*sizes, *[1] * more]
    try:
        yield
    finally:
        run.strategy.extended.micro_batch_sizes = before


@contextlib.contextmanager
def counted_compilations() -> Iterator[Counter[str]]:
    """Counts the operations, by type, that XLA compiles in steps that are traced meanwhile."""
    marked: Counter[str] = Counter()
    original = private_api.compile_operation

    def compile_operation(operation: tf.Operation) -> None:
        marked[operation.type] += 1
        original(operation)

    private_api.compile_operation = compile_operation
    try:
        yield marked
    finally:
        private_api.compile_operation = original


def save_variables(model: Any, path: str, **more: Any) -> None:
    """Writes what `assert_same_variables` compares."""
    variables = [*model.weights, *model.optimizer.variables]
    named = {f"variable_{position}": np.array(v) for position, v in enumerate(variables)}
    np.savez(path, **named, **more)


def run_each(
    names: Sequence[str], run: Callable[[str], Mapping[str, Any]], folder: Path, task: str
) -> None:
    """Runs checks one after the other; writes what each gives, or how it failed."""
    for name in names:
        # A worker that waits for ever is ended, with a stack trace in its output.
        faulthandler.dump_traceback_later(LONGEST_CHECK_SECONDS, exit=True)
        keras.backend.clear_session()
        started = time.monotonic()
        try:
            found = run(name)
        except Exception:
            traceback.print_exc()
            found = {"failed": np.array(traceback.format_exc())}
        np.savez(folder / f"{name.replace('/', '-')}-{task}.npz", **found)
        print(f"{name}: {time.monotonic() - started:.1f} s", flush=True)
    faulthandler.cancel_dump_traceback_later()


def train_in_a_loop(strategy: Any, model: Any, data: Any, at_step: Callable[[int], None]) -> None:
    """Goes through data without Keras's `fit`; no weight changes."""

    @tf.function
    def step(batch: Any) -> Any:
        return strategy.run(lambda x, y: tf.reduce_sum(model(x) - y), args=batch)

    for number, batch in enumerate(strategy.distribute(data)):
        strategy.reduce("SUM", step(batch), axis=None)
        at_step(number)
