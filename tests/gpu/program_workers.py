"""Program: trains in float64 on two workers of one machine with one GPU.

Arguments: "one", "all_reduce", "summation" or "hybrid"; folder of the results. In a hybrid training
the second worker has no GPU.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # keras-het run hides one GPU from two workers

import keras
import numpy as np
import tensorflow as tf

import keras_het

MODE, FOLDER = sys.argv[1], Path(sys.argv[2])
INDEX = json.loads(os.environ.get("TF_CONFIG", '{"task": {"index": 0}}'))["task"]["index"]
TYPE = json.loads(os.environ.get("TF_CONFIG", '{"task": {"type": "worker"}}'))["task"]["type"]


def make_strategy() -> keras_het.HeterogeneousStrategy:
    if MODE == "hybrid":
        if TYPE == "async":
            tf.config.set_visible_devices([], "GPU")
        return keras_het.HeterogeneousStrategy()
    ring = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation.RING
    )
    return keras_het.HeterogeneousStrategy(
        devices=["GPU:0"],
        share_weights=[3, 1] if MODE != "one" else None,
        communication_options=ring,
        gradient_reduction="all_reduce" if MODE == "one" else MODE,
    )


def main() -> None:
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    strategy = make_strategy()
    keras.utils.set_random_seed(5)
    with strategy.scope():
        layers = [
            keras.layers.Reshape([8, 8, 1]),
            keras.layers.Conv2D(8, 3, activation="relu"),
            keras.layers.BatchNormalization(synchronized=True),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
        model = keras.Sequential([keras.Input([64]), *layers])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.02, momentum=0.9), loss, metrics=["accuracy"])
    random = np.random.default_rng(0)
    labels = random.integers(0, 10, 700)
    x = random.normal(size=(700, 64)) + random.normal(size=(10, 64))[labels]
    data = tf.data.Dataset.from_tensor_slices((x, labels)).batch(32)
    if MODE == "hybrid":
        train_hybrid(strategy, model, data)
        return
    model.fit(strategy.distribute(data), epochs=2, verbose=0)
    if strategy.is_chief:
        np.savez(FOLDER / f"{MODE}.npz", **{w.path: w.numpy() for w in model.weights})


def train_hybrid(
    strategy: keras_het.HeterogeneousStrategy, model: keras.Model, data: tf.data.Dataset
) -> None:
    hybrid = keras_het.callbacks.AsyncWorkers("delta", period=2)
    used: list[int] = []

    class Notes(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: object = None) -> None:
            if strategy.is_chief and hybrid.samples_used is not None:
                used[:] = hybrid.samples_used

    history = model.fit(data, epochs=8, verbose=0, callbacks=[hybrid, Notes()]).history
    device = strategy.extended.worker_devices[0].split("device:")[-1]
    if strategy.is_async_worker:
        (FOLDER / "other.json").write_text(json.dumps(device))
    elif strategy.is_chief:
        found = {
            "device": device,
            "other_device": json.loads((FOLDER / "other.json").read_text()),
            "used": used,
            "loss": history["loss"],
        }
        (FOLDER / "hybrid.json").write_text(json.dumps(found))


main()
