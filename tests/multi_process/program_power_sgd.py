"""Program: trains models whose gradients travel with low rank, beside the same in numpy.

Arguments: folder of the results; number of devices of each worker, separated by commas; names of
the cases. Three replicas have 5, 2 and 1 of the 8 samples of a batch, or all are the first one's.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
from own_devices import split_devices
from recording import counted_compilations

import keras_het

SHARES, ALL_TO_THE_FIRST = (5, 2, 1), (1, 0, 0)
RANK, RATE, INPUTS, STEPS = 2, 0.1, 16, 3
BATCH = sum(SHARES)
SHAPES = ((INPUTS, 4, 6), (24, 40), (40,), (40, 1), (1,))
# Of each: how it differs from one `fit` of an epoch in float64, by the next `fit`s' shares.
CASES: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "shares": {"shares": [SHARES, ALL_TO_THE_FIRST, SHARES]},
    "in parts": {"micro_batch_size": 2},
    "in one call": {"steps_per_execution": 2},
    "clipped": {"global_clipnorm": 0.3},
    "in buckets": {"bytes_per_bucket": 1},
    "compiled": {"jit_compile": True},
    "eager": {"run_eagerly": True},
    "whole": {"rank": None},
    "measured": {"shares": [SHARES, SHARES], "measures": True},  # the last: others would be too
}


def samples() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(5)
    x = random.normal(size=(STEPS * BATCH, INPUTS))
    return x, np.sin(x.sum(1, keepdims=True)) + random.normal(size=(len(x), 1))


def first_weights() -> list[np.ndarray]:
    random = np.random.default_rng(6)
    return [random.normal(size=shape) / np.sqrt(shape[0]) for shape in SHAPES]


class Reference:
    """Training in numpy, with the parts that workers with so many devices have."""

    def __init__(self, devices: list[int], rank: int | None, clipnorm: float | None = None) -> None:
        self.weights, self._devices = first_weights(), devices
        self._rank, self._clipnorm = rank, clipnorm
        self._bases: dict[int, np.ndarray] = {}
        self._errors: dict[int, list[np.ndarray]] = {}

    def fit(self, shares: tuple[int, ...], skipped: Any = (False,) * STEPS) -> None:
        x, y = samples()
        for step, is_skipped in enumerate(skipped):
            rows = slice(step % STEPS * BATCH, (step % STEPS + 1) * BATCH)
            if not is_skipped:
                self._step(x[rows], y[rows], shares)

    def _step(self, x: np.ndarray, y: np.ndarray, shares: tuple[int, ...]) -> None:
        ends = np.cumsum([share * BATCH // sum(shares) for share in shares])
        ends_of_workers = [0, *ends[np.cumsum(self._devices) - 1]]
        parts = [
            self._gradients(x[start:end], y[start:end])
            for start, end in itertools.pairwise(ends_of_workers)
        ]
        sums = [self._sum(place, each) for place, each in enumerate(zip(*parts, strict=True))]
        if self._clipnorm is not None:
            norm = np.sqrt(sum(np.sum(each**2) for each in sums))
            sums = [each * min(1, self._clipnorm / norm) for each in sums]
        self.weights = [w - RATE * each for w, each in zip(self.weights, sums, strict=True)]

    def _gradients(self, x: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
        """Of the mean of squares over a batch, of which these are some rows."""
        kernel, inner, bias, last, last_bias = self.weights
        first = np.tanh(x @ kernel.reshape(INPUTS, -1))
        second = np.tanh(first @ inner + bias)
        of_output = 2 * (second @ last + last_bias - y) / BATCH
        of_second = of_output @ last.T * (1 - second**2)
        of_first = of_second @ inner.T * (1 - first**2)
        return [
            (x.T @ of_first).reshape(kernel.shape),
            first.T @ of_second,
            of_second.sum(0),
            second.T @ of_output,
            of_output.sum(0),
        ]

    def _sum(self, place: int, parts: tuple[np.ndarray, ...]) -> np.ndarray:
        shape = parts[0].shape
        if place > 1 or self._rank is None:  # long and thin
            return np.sum(parts, axis=0)
        matrices = [each.reshape(-1, shape[-1]) for each in parts]
        sides = matrices[0].shape
        if is_tall := sides[0] > sides[1]:
            matrices = [each.T for each in matrices]
        random = np.random.default_rng(sides).normal(size=(max(sides), self._rank))
        basis = self._bases.get(place, random)
        errors = self._errors.get(place, [np.zeros(each.shape) for each in matrices])
        own = [matrix + error for matrix, error in zip(matrices, errors, strict=True)]
        columns = np.linalg.qr(np.sum([matrix @ basis for matrix in own], axis=0))[0]
        own_bases = [matrix.T @ columns for matrix in own]
        self._bases[place] = np.sum(own_bases, axis=0)
        self._errors[place] = [
            matrix - columns @ each.T for matrix, each in zip(own, own_bases, strict=True)
        ]
        total = columns @ self._bases[place].T
        return (total.T if is_tall else total).reshape(shape)


def new_model(dtype: str, optimizer: keras.optimizers.Optimizer, **options: Any) -> keras.Model:
    layers = [
        keras.layers.EinsumDense("bi,ijk->bjk", SHAPES[0][1:], activation="tanh"),
        keras.layers.Flatten(),
        keras.layers.Dense(40, "tanh"),
        keras.layers.Dense(1),
    ]
    model = keras.Sequential([keras.Input((INPUTS,), dtype=dtype), *layers])
    model.set_weights(first_weights())
    options = {"jit_compile": False, **options}
    model.compile(optimizer, "mse", metrics=["mae"], **options)
    return model


def flat(weights: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.ravel(weight) for weight in weights])


def trained(
    strategy: Any,
    shares: list[tuple[int, ...]],
    dtype: str = "float64",
    global_clipnorm: float | None = None,
    measures: bool = False,
    **options: Any,
) -> np.ndarray:
    keras.config.set_floatx(dtype)
    keras.config.set_dtype_policy(dtype)
    with strategy.scope():
        optimizer = keras.optimizers.SGD(RATE, global_clipnorm=global_clipnorm)
        model = new_model(dtype, optimizer, **options)
    x, y = (each.astype(dtype) for each in samples())
    for number, each in enumerate(shares):
        strategy.set_share_weights(each)
        if measures and number:
            strategy.extended.compute_times.begin(model)
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    return flat(model.get_weights())


def scaled(strategy: Any, devices: list[int]) -> dict[str, np.ndarray]:
    """The loss scale and all weights after each step, from a scale that overflows again and again.

    The reference skips the same steps.
    """
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
    strategy.set_share_weights(SHARES)
    with strategy.scope():
        inner = keras.optimizers.SGD(RATE)
        optimizer = keras.optimizers.LossScaleOptimizer(
            inner, initial_scale=2.0**127, dynamic_growth_steps=2
        )
        model = new_model("float32", optimizer)
        optimizer.build(model.trainable_variables)
    seen = [np.r_[float(optimizer.dynamic_scale.numpy()), flat(first_weights())]]

    def note(batch: int, logs: Any) -> None:
        seen.append(np.r_[float(optimizer.dynamic_scale.numpy()), flat(model.get_weights())])

    callback = keras.callbacks.LambdaCallback(on_train_batch_end=note)
    x, y = (each.astype("float32") for each in samples())
    options = {"shuffle": False, "verbose": 0, "callbacks": [callback]}
    model.fit(x, y, batch_size=BATCH, epochs=6, **options)
    steps = np.array(seen)
    reference = Reference(devices, RANK)
    reference.fit(SHARES, steps[1:, 0] < steps[:-1, 0])
    return {"scaled": steps, "scaled, expected": flat(reference.weights)}


def main() -> None:
    folder = sys.argv[1]
    devices, own = split_devices(sys.argv[2])
    strategy = keras_het.HeterogeneousStrategy(
        [f"CPU:{index}" for index in range(own)], SHARES, powersgd_rank=RANK
    )
    with strategy.extended.reductions_within_worker():  # as in local training
        assert strategy.extended.power_sgd is None
    operations = strategy.extended._cross_device_ops
    sums, original = [0], operations._all_reduce_by_type

    def all_reduce_by_type(*args: Any) -> Any:
        sums[0] += 1
        return original(*args)

    operations._all_reduce_by_type = all_reduce_by_type
    found: dict[str, Any] = scaled(strategy, devices)
    for name in [each for each in CASES if each in sys.argv[3:]]:
        options = CASES[name]
        rank = options.pop("rank", RANK)
        strategy.extended.send_low_rank(rank)
        strategy.extended.bytes_per_bucket = options.pop("bytes_per_bucket", 0)
        size = options.pop("micro_batch_size", None)
        strategy.extended.micro_batch_sizes = None if size is None else [size] * len(SHARES)
        shares = options.pop("shares", [SHARES])
        sums[0] = 0
        with counted_compilations() as compilations:
            found[name] = trained(strategy, shares, **options)
        found[f"{name}, compiled"] = compilations["MatMul"]
        found[f"{name}, sums"] = sums[0]
        reference = Reference(devices, rank, options.get("global_clipnorm"))
        for each in shares:
            reference.fit(each)
        found[f"{name}, expected"] = flat(reference.weights)
    np.savez(Path(folder) / f"{strategy.worker_index}.npz", **found)


main()
