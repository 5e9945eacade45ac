"""Checks of `exactness_checks` whose steps XLA compiles, on one device too."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from recording import (
    Recording,
    batches,
    check,
    counted_compilations,
    in_buckets,
    in_parts,
    small_model,
)


@check
def compiled_by_xla(run: Recording) -> None:
    run.set_share_weights([4, 0, 1])
    model = run.build(lambda: small_model("adam", jit_compile=True, metrics=["mae"]))
    with counted_compilations() as compilations:
        run.fit(model, batches(), validation_data=batches(15, 6))
    assert run.strategy is None or compilations["MatMul"]
    run.keep("predict", model.predict(batches(), verbose=0))


@check
def compiled_by_xla_in_buckets(run: Recording) -> None:
    run.set_share_weights([4, 0, 1])
    with in_buckets(run), counted_compilations() as compilations:
        model = run.build(lambda: small_model("adam", jit_compile=True))
        run.fit(model, batches())
    assert run.strategy is None or compilations["MatMul"]


@check
def compiled_by_xla_with_sparse_gradients(run: Recording) -> None:
    tokens = np.random.default_rng(3).integers(0, 7, size=(22, 4))
    run.set_share_weights([4, 0, 1])

    def make_model() -> Any:
        layers = [keras.layers.Embedding(7, 3), keras.layers.Flatten(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((4,), dtype="int32"), *layers])
        model.compile("adam", "mse", metrics=["mae"], jit_compile=True)
        return model

    data = tf.data.Dataset.from_tensor_slices((tokens, tokens.mean(1, keepdims=True))).batch(8)
    with counted_compilations() as compilations:
        run.fit(run.build(make_model), data)
    assert run.strategy is None or compilations["MatMul"]


@check
def compiled_by_xla_in_parts(run: Recording) -> None:
    run.set_share_weights([4, 0, 1])
    model = run.build(lambda: small_model("adam", jit_compile=True))
    with in_parts(run, 2, 2, 1), counted_compilations() as compilations:
        run.fit(model, batches())
    assert run.strategy is None or compilations["MatMul"]
