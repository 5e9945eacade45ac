"""Two fast workers all-reduce while a slow one trains on its own: no worker waits for it.

    python recipes/hybrid.py [--rule delta] [--seeds 1]

Trains handwritten digits on emulated devices of speed 8:8:1: synchronously with an even split,
without the slow worker, and hybrid, where the slow worker takes batches of the same epoch at its
own pace and exchanges with the leader's parameter service. Prints time, samples of each and
accuracy.

An eighth of the speed shows how it works, not that it pays: leaving such a worker out is faster,
and `roles="auto"` does (docs/guides/async_workers.md).
"""

import argparse
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

SPEEDS = (8.0, 8.0, 1.0)
BATCH_SIZE = 56
EPOCHS = 12
PERIOD = 4
RATE = 0.05
# Rules that send gradients keep the optimizer in the service, the others in the worker.
RULES: dict[str, str | dict[str, Any]] = {
    "delta": "delta",
    "async_sgd": {"class_name": "AsyncSGD", "config": {"learning_rate": RATE}},
    "delay_compensated": {
        "class_name": "DelayCompensated",
        "config": {"learning_rate": RATE, "compensation": 0.04},
    },
    "async_easgd": "async_easgd",
    "async_measgd": "async_measgd",
    "hogwild_easgd": "hogwild_easgd",
}
MODES = ("even split", "left out", "hybrid")


def train(directory: Path, mode: str, rule: str, seed: int) -> None:
    """Train; every worker runs this same script."""
    import keras
    from digits import global_batches, load_digits, make_model
    from workers import save

    import keras_het

    strategy = keras_het.HeterogeneousStrategy()
    keras.utils.set_random_seed(seed)
    momentum = 0.0 if rule in ("async_easgd", "hogwild_easgd") else 0.9
    with strategy.scope():
        model = make_model()
        model.compile(
            keras.optimizers.SGD(RATE, momentum=momentum),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    (images, labels), test = load_digits()
    hybrid = keras_het.callbacks.AsyncWorkers(RULES[rule], period=PERIOD)
    used: dict[str, list[int]] = {}

    class Notes(keras.callbacks.Callback):
        """Record of each worker's samples, and of the time without the first epoch's tracing."""

        started = ended = 0.0

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.started = self.started or time.perf_counter()
            self.ended = time.perf_counter()
            if strategy.is_chief and hybrid.samples_used is not None:
                used["samples"] = hybrid.samples_used

    notes = Notes()
    batches = global_batches(images, labels, BATCH_SIZE)
    model.fit(batches, epochs=EPOCHS, verbose=0, callbacks=[hybrid, notes])
    if strategy.is_async_worker:
        return
    accuracy = model.evaluate(*test, batch_size=120, verbose=0, return_dict=True)["accuracy"]
    if strategy.is_chief:
        numbers = {
            "seconds": notes.ended - notes.started,
            "accuracy": float(accuracy),
            "samples": used.get("samples", [len(labels) * EPOCHS]),
        }
        save(directory, f"{mode}-{seed}", numbers, [])


def compare(rule: str, seeds: int) -> None:
    from workers import run_workers

    from keras_het.launch.local.worker_environment import Emulation

    console = Console()
    console.print(f"EMULATED devices of speed {':'.join(f'{s:g}' for s in SPEEDS)}, rule {rule}")
    table = Table("mode", "s an epoch", "samples/s", "samples: group, slow one", "test accuracy")
    for mode in MODES:
        speeds = SPEEDS[:2] if mode == "left out" else SPEEDS
        rows = []
        for seed in range(seeds):
            arguments = ["--worker", "--mode", mode, "--rule", rule, "--seed", str(seed)]
            [(numbers, _)] = run_workers(
                console,
                Path(__file__),
                arguments,
                Emulation(speeds),
                [f"{mode}-{seed}"],
                num_async_workers=int(mode == "hybrid"),
            )
            rows.append(numbers)
        seconds = sum(row["seconds"] for row in rows) / len(rows) / (EPOCHS - 1)
        accuracy = sum(row["accuracy"] for row in rows) / len(rows)
        samples = sum(sum(row["samples"]) for row in rows) / len(rows) / EPOCHS
        table.add_row(
            mode,
            f"{seconds:.2f}",
            f"{samples / seconds:.0f}",
            " + ".join(f"{count}" for count in rows[0]["samples"]),
            f"{100 * accuracy:.2f} %",
        )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rule", choices=sorted(RULES), default="delta")
    parser.add_argument("--seeds", type=int, default=1, help="trainings of each kind")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--mode", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        train(options.directory, options.mode, options.rule, options.seed)
    else:
        compare(options.rule, options.seeds)


if __name__ == "__main__":
    main()
