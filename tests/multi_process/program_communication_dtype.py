"""Program: trains a linear model whose gradients travel in 16 bits, beside the same in numpy.

Arguments: folder of the results; number of devices of each worker, separated by commas; names of
the cases. Three replicas have 4, 3 and 1 of the 8 samples of a batch, five have 3, 0, 2, 2 and 1.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from own_devices import split_devices
from recording import counted_compilations

import keras_het

SHARES = {3: (4, 3, 1), 5: (3, 0, 2, 2, 1)}[sum(int(each) for each in sys.argv[2].split(","))]
RATE, INPUTS = 0.5, 4
CASES: dict[str, tuple[str | None, dict[str, Any]]] = {
    "bfloat16": ("bfloat16", {}),
    "in buckets": ("float16", {"bytes_per_bucket": 1}),
    "in parts": ("bfloat16", {"micro_batch_size": 2}),
    "compiled": ("bfloat16", {"jit_compile": True}),
    "as they are": (None, {}),
    "measured": ("bfloat16", {"measures": True}),  # the last one: later steps would be too
}


def samples() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(5)
    x = random.normal(size=(3 * sum(SHARES), INPUTS)).astype("float32")
    return x, (x.sum(1, keepdims=True) + random.normal(size=(len(x), 1))).astype("float32")


def expected(dtype: str | None, devices: list[int]) -> np.ndarray:
    """Weights after an epoch in which each worker rounds its part of the mean gradient.

    Four workers and more round the sum, too.
    """
    x, y = samples()
    weights, start = np.zeros(INPUTS + 1), 0
    ends = np.cumsum(SHARES)
    while start < len(x):
        total, replica = np.zeros(INPUTS + 1), 0
        for number in devices:
            first = start + (ends[replica - 1] if replica else 0)
            replica += number
            rows = np.c_[x, np.ones(len(x))][first : start + ends[replica - 1]]
            of_rows = y[first : start + ends[replica - 1], 0]
            part = 2 * (rows @ weights - of_rows) @ rows / sum(SHARES)
            total += rounded(part, dtype)
        if len(devices) > 3:
            total = rounded(total, dtype)
        weights = weights - RATE * 0.1 * total
        start += sum(SHARES)
    return weights


def rounded(values: np.ndarray, dtype: str | None) -> np.ndarray:
    sent = tf.cast(tf.constant(values, "float32"), dtype or "float32")
    return np.asarray(tf.cast(sent, "float64"))


def trained(strategy: Any, measures: bool = False, jit_compile: bool = False) -> np.ndarray:
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((INPUTS,)), keras.layers.Dense(1, kernel_initializer="zeros")]
        )
        optimizer = keras.optimizers.SGD(RATE * 0.1)
        model.compile(optimizer, "mse", metrics=["mae"], jit_compile=jit_compile)
    x, y = samples()
    if measures:
        strategy.extended.compute_times.begin(model)
    model.fit(x, y, batch_size=sum(SHARES), shuffle=False, verbose=0)
    return np.concatenate([weight.ravel() for weight in model.get_weights()])


def scales_and_weights(strategy: Any) -> np.ndarray:
    """The loss scale and a weight after each step, from a scale that overflows float16."""
    strategy.extended.send_gradients_as("float16")
    seen: list[list[float]] = []
    with strategy.scope():
        model = keras.Sequential([keras.Input((INPUTS,)), keras.layers.Dense(1)])
        inner = keras.optimizers.SGD(RATE * 0.1)
        optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**20)
        model.compile(optimizer, "mse", jit_compile=False)
        optimizer.build(model.trainable_variables)

    def note(batch: int, logs: Any) -> None:
        scale = float(optimizer.dynamic_scale.numpy())
        seen.append([scale, *model.get_weights()[0].ravel().tolist()])

    note(0, None)
    callback = keras.callbacks.LambdaCallback(on_train_batch_end=note)
    x, y = samples()
    options = {"shuffle": False, "verbose": 0, "callbacks": [callback]}
    model.fit(x, y, batch_size=sum(SHARES), epochs=6, **options)
    return np.array(seen)


def main() -> None:
    folder = sys.argv[1]
    devices, own = split_devices(sys.argv[2])
    strategy = keras_het.HeterogeneousStrategy(
        [f"CPU:{index}" for index in range(own)], SHARES, communication_dtype="bfloat16"
    )
    assert strategy.extended.communication_dtype == tf.bfloat16
    found: dict[str, Any] = {}
    for name in [each for each in CASES if each in sys.argv[3:]]:
        dtype, options = CASES[name]
        strategy.extended.send_gradients_as(dtype)
        strategy.extended.bytes_per_bucket = options.pop("bytes_per_bucket", 0)
        size = options.pop("micro_batch_size", None)
        strategy.extended.micro_batch_sizes = None if size is None else [size] * len(SHARES)
        with counted_compilations() as compilations:
            found[name] = trained(strategy, **options)
        found[f"{name}, compiled"] = compilations["MatMul"]
        found[f"{name}, expected"] = expected(dtype, devices)
    found["scaled"] = scales_and_weights(strategy)
    found["seconds"] = strategy.extended.compute_times.latest(1)[0].seconds
    np.savez(Path(folder) / f"{strategy.worker_index}.npz", **found)


main()
