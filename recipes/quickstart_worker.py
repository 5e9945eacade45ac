"""Worker of the quickstart: an ordinary Keras script and a stopwatch.

`quickstart.py` starts it as three workers with emulated devices, and once without a strategy, as
the one device to compare with.
"""

import argparse
import contextlib
from pathlib import Path
from typing import Any

import keras
import numpy as np
from digits import global_batches, load_digits, make_model
from stopwatch import Stopwatch
from workers import save

import keras_het


class PrintEpochs(keras.callbacks.Callback):
    """Printout of one line per epoch."""

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        values = ", ".join(f"{name} {value:.4f}" for name, value in (logs or {}).items())
        print(f"epoch {epoch + 1}: {values}", flush=True)


def train(
    strategy: Any, balancer: Any, epochs: int, batch_size: int
) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Train and test a new model; return numbers for the summary and the final weights.

    Args:
        strategy: the `HeterogeneousStrategy`, or None for plain Keras.
        balancer: the `BatchBalancer`, or None for plain Keras.
        epochs: passes over the training data.
        batch_size: samples of a step over all workers.
    """
    train_data, test_data = load_digits()
    keras.utils.set_random_seed(0)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = make_model()
    stopwatch = Stopwatch()
    # The balancer works between two steps, so the stopwatch includes its cost.
    callbacks = [PrintEpochs(), *([balancer] if balancer else []), stopwatch]
    data = global_batches(*train_data, batch_size)
    model.fit(data, epochs=epochs, verbose=0, callbacks=callbacks)
    results = model.evaluate(global_batches(*test_data, batch_size), verbose=0, return_dict=True)
    numbers = {
        "test_accuracy": float(results["accuracy"]),
        **step_times(stopwatch, len(train_data[0]), batch_size),
        **(compute_times(balancer, batch_size) if balancer else {}),
    }
    return numbers, model.get_weights()


def step_times(stopwatch: Stopwatch, num_samples: int, batch_size: int) -> dict[str, Any]:
    """Return the speed over all timed steps, and the median time of those with a full batch."""
    samples = {
        step: min(batch_size, num_samples - step[1] * batch_size) for step in stopwatch.seconds
    }
    full = [s for step, s in stopwatch.seconds.items() if samples[step] == batch_size]
    return {
        "samples_per_second": sum(samples.values()) / sum(stopwatch.seconds.values()),
        "step_seconds": float(np.median(full)),
    }


def compute_times(
    balancer: keras_het.callbacks.BatchBalancer, batch_size: int
) -> dict[str, list[Any]]:
    """Return the latest split of a full batch, and each replica's median compute time with it."""
    full = [row for row in balancer.measurements if sum(row["shares"]) == batch_size]
    shares = full[-1]["shares"]
    seconds = [row["seconds"] for row in full if row["shares"] == shares]
    return {"shares": shares, "compute_seconds": np.median(seconds, axis=0).tolist()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--alone", action="store_true", help="plain Keras on one device")
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--directory", type=Path, required=True, help="for the chief's results")
    options = parser.parse_args()
    if options.alone:
        print("One device, plain Keras without a strategy:", flush=True)
        save(options.directory, "one", *train(None, None, options.epochs, options.batch_size))
        return
    strategy = keras_het.HeterogeneousStrategy()
    # The policy "even" changes nothing; it is used for its measurements.
    for name, policy in ("even", "even"), ("balanced", "min_max"):
        if strategy.is_chief:
            print(f'Three workers, BatchBalancer("{policy}"):', flush=True)
        # Without other shares, every training starts from the even split.
        strategy.set_share_weights([1.0] * strategy.num_workers)
        balancer = keras_het.callbacks.BatchBalancer(policy, verbose=1)
        outcome = train(strategy, balancer, options.epochs, options.batch_size)
        if strategy.is_chief:
            save(options.directory, name, *outcome)


if __name__ == "__main__":
    main()
