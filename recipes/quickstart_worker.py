"""What every worker of the quickstart runs: an ordinary Keras script and a stopwatch.

`quickstart.py` starts it as three workers with emulated devices, and once without a strategy, as
the one device to compare with.
"""

import argparse
import contextlib
import json
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
from digits import global_batches, load_digits, make_model

import keras_het

# Tracing and the first fill of the pipelines are not what training costs.
SKIPPED_STEPS = 5


class Stopwatch(keras.callbacks.Callback):
    """Takes the time from the end of a step to the end of the next one within an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: dict[tuple[int, int], float] = {}
        self._epoch = 0
        self._last = 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        now = time.perf_counter()
        if batch >= (SKIPPED_STEPS if self._epoch == 0 else 1):
            self.seconds[self._epoch, batch] = now - self._last
        self._last = now

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        values = ", ".join(f"{name} {value:.4f}" for name, value in (logs or {}).items())
        print(f"  epoch {epoch + 1}: {values}", flush=True)


def train(strategy: Any, epochs: int, batch_size: int) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Trains and tests a new model; returns numbers for the summary and the final weights.

    Args:
        strategy: the `HeterogeneousStrategy`, or None for plain Keras.
        epochs: passes over the training data.
        batch_size: samples of a step over all workers.
    """
    train_data, test_data = load_digits()
    keras.utils.set_random_seed(0)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = make_model()
    stopwatch = Stopwatch()
    data = global_batches(*train_data, batch_size)
    model.fit(data, epochs=epochs, verbose=0, callbacks=[stopwatch])
    results = model.evaluate(global_batches(*test_data, batch_size), verbose=0, return_dict=True)
    samples = {
        step: min(batch_size, len(train_data[0]) - step[1] * batch_size)
        for step in stopwatch.seconds
    }
    full = [s for step, s in stopwatch.seconds.items() if samples[step] == batch_size]
    numbers = {
        "samples_per_second": sum(samples.values()) / sum(stopwatch.seconds.values()),
        "step_seconds": float(np.median(full)),
        "test_accuracy": float(results["accuracy"]),
    }
    return numbers, model.get_weights()


def save(directory: Path, name: str, numbers: dict[str, Any], weights: list[np.ndarray]) -> None:
    np.savez(directory / f"{name}.npz", *weights)
    (directory / f"{name}.json").write_text(json.dumps(numbers))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shares", type=float, nargs="+", help="default: plain Keras, one device")
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--directory", type=Path, required=True, help="for the chief's results")
    options = parser.parse_args()
    if options.shares is None:
        print("One device, plain Keras without a strategy", flush=True)
        save(options.directory, "one", *train(None, options.epochs, options.batch_size))
        return
    strategy = keras_het.HeterogeneousStrategy(shares=options.shares)
    for name, shares in ("uneven", options.shares), ("even", [1.0] * len(options.shares)):
        # Shares may change at any time; here between two trainings, to compare them.
        strategy.set_shares(shares)
        print(f"Three workers, shares {':'.join(f'{share:g}' for share in shares)}", flush=True)
        outcome = train(strategy, options.epochs, options.batch_size)
        if strategy.is_chief:
            save(options.directory, name, *outcome)


if __name__ == "__main__":
    main()
