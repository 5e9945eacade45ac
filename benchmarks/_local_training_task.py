"""Task of the benchmark of local training: digits, trained until an epoch or until it is killed.

Every process appends a line after each of its steps: time, samples so far, epoch, step. The one
that keeps the center, or the chief, writes the loss over the training data at the end.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

LOCAL_BATCH, NUM_WORKERS = 24, 3
SAMPLES = LOCAL_BATCH * NUM_WORKERS * 24  # of an epoch
PERIOD, SLOWEST_PERIOD = 12, 5  # 36 and 35 local batches in a round of all
RATE = 0.1
MODES = ("plain", "balanced", "delayed_nesterov")


def callback_of(mode: str) -> Any:
    """Return the callback by which a mode trains."""
    import keras_het

    if mode == "delayed_nesterov":
        rule = {"class_name": mode, "config": {"period": SLOWEST_PERIOD}}
        return keras_het.callbacks.AsyncWorkers(rule)
    is_balanced = mode == "balanced"
    return keras_het.callbacks.LocalTraining("diloco", period=PERIOD, balance=is_balanced)


def train(options: argparse.Namespace) -> None:
    """Train, and write down each step."""
    import keras
    import sklearn.datasets
    import tensorflow as tf

    import keras_het

    strategy = keras_het.HeterogeneousStrategy()
    config = strategy.extended.cluster_config
    name = f"{config.task_type}_{config.task_index}"
    keras.utils.set_random_seed(options.seed)
    digits = sklearn.datasets.load_digits()
    x, y = (digits.data[:SAMPLES] / 16).astype("float32"), digits.target[:SAMPLES]
    is_asynchronous = options.mode == "delayed_nesterov"
    batch = LOCAL_BATCH if is_asynchronous else LOCAL_BATCH * NUM_WORKERS
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(SAMPLES, seed=options.seed)
    with strategy.scope():
        layers = [keras.layers.Dense(32, activation="relu"), keras.layers.Dense(10)]
        model = keras.Sequential([keras.Input((64,)), *layers])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(RATE), loss)

    class Steps(keras.callbacks.Callback):
        """A line for each step."""

        def on_train_begin(self, logs: Any = None) -> None:
            self.file = (options.folder / f"{name}.{time.time_ns()}.steps").open("w", buffering=1)
            self.before = strategy.local_samples_delivered

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch = epoch

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            samples = strategy.local_samples_delivered - self.before
            self.file.write(f"{time.monotonic()} {samples} {self.epoch} {batch}\n")

    callbacks = [callback_of(options.mode), Steps()]
    if options.backup:
        callbacks.append(keras_het.callbacks.BackupAndRestore(str(options.folder / "backup")))
    model.fit(dataset.batch(batch), epochs=options.epochs, callbacks=callbacks, verbose=0)
    if strategy.is_parameter_server if is_asynchronous else strategy.is_chief:
        logits = model(x).numpy()
        found = float(keras.ops.mean(keras.losses.sparse_categorical_crossentropy(y, logits, True)))
        (options.folder / "loss.json").write_text(json.dumps(found))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=MODES, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--backup", action="store_true")
    train(parser.parse_args())
