"""Task of the hybrid benchmarks: two fits, of which the second is timed.

The task (see `_noisy_task`) needs many samples rather than many steps, like trainings to which
machines are added: a synchronous batch of twice the size needs about half the steps. Otherwise no
additional machine pays, whatever the mode. A first short `fit` traces and connects everything; the
second restarts from the initial weights and is timed from its first step. One worker keeps its
weights every few steps; the first ones that reach the target, evaluated afterwards, determine the
time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from _noisy_task import HIDDEN, NUM_CLASSES, NUM_INPUTS, TARGET, NoisyTask

BATCH, MOMENTUM = 48, 0.9
# The best of 0.005, 0.007, 0.01 and 0.014 in a simulation with numpy, for the synchronous group and
# for hybrid; ten times that without momentum.
RATE, PLAIN_RATE = 0.01, 0.1
SAMPLES, WARM_UP_BATCHES, STEPS_BETWEEN_LOOKS = 14400, 96, 4
TIMEOUT_SECONDS = 240
SERVICE_SECONDS = 5  # for each message to the parameter service
PERIOD = "1"  # of exchanges, unless the mode specifies it, as "hybrid:delta:auto" does


def command(mode: str, seed: int, samples: int, result: Path, *more: str) -> list[str]:
    """Return the command of a task.

    Args:
        mode: the benchmark's mode.
        seed: seed of the weights.
        samples: samples per epoch.
        result: file for the measurements; others next to it tell how far training is.
        more: additional arguments.
    """
    script = str(Path(__file__).resolve())
    arguments = ["--mode", mode, "--seed", str(seed), "--samples", str(samples)]
    return [sys.executable, script, *arguments, "--result", str(result), *more]


def wait_for(path: Path, least: int = 0) -> None:
    """Wait until a file is there and has at least a number in it."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not path.exists() or (least and int(path.read_text() or 0) < least):
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {path.name} after {TIMEOUT_SECONDS} s")
        time.sleep(0.05)


def train(options: argparse.Namespace) -> None:
    """Train twice and write the measurements of the second training."""
    import keras

    import keras_het
    from keras_het.strategy.cluster.cluster_config import CHOSEN_ROLES

    strategy = keras_het.HeterogeneousStrategy()
    config = strategy.extended.cluster_config
    # With async workers only, it is the first of them.
    tells = strategy.is_chief and not strategy.is_parameter_server
    if not config.has_sync_group:
        tells = strategy.is_async_worker and config.task_index == 0
    keras.utils.set_random_seed(options.seed)
    rate, momentum = (PLAIN_RATE, 0.0) if "easgd" in options.mode else (RATE, MOMENTUM)
    with strategy.scope():
        layers = [keras.layers.Dense(HIDDEN, activation="relu"), keras.layers.Dense(NUM_CLASSES)]
        model = keras.Sequential([keras.Input((NUM_INPUTS,)), *layers])
        model.compile(
            keras.optimizers.SGD(rate, momentum=momentum),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    task = NoisyTask(options.samples)
    first_weights = model.get_weights()

    class Clock(keras.callbacks.Callback):
        """Times of the steps from the first one on, and the weights every few steps."""

        def on_train_begin(self, logs: Any = None) -> None:
            self.ends: list[float] = []
            self.seen: list[tuple[float, list[Any]]] = []

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.ends.append(time.perf_counter())
            steps = len(self.ends)
            if strategy.is_async_worker:
                options.result.with_suffix(".async").write_text(str(steps))
            if tells:
                options.result.with_suffix(".steps").write_text(str(steps))
                if steps % STEPS_BETWEEN_LOOKS == 0:
                    self.seen.append((self.ends[-1] - self.ends[0], self.model.get_weights()))

    class Meeting(keras.callbacks.Callback):
        """Pause after the first step of training until all async workers are present."""

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if strategy.is_async_worker:
                options.result.with_suffix(f".joined{config.task_index}").touch()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            deadline = time.monotonic() + TIMEOUT_SECONDS
            while tells and batch == 0 and self.num_there < strategy.num_async_workers:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{self.num_there} async workers came")
                time.sleep(0.05)

        @property
        def num_there(self) -> int:
            return len(list(options.result.parent.glob("*.joined*")))

    clock = Clock()
    rule, _, period = options.mode.partition(":")[2].partition(":")
    period = period or PERIOD
    callbacks: list[Any] = [
        keras_het.callbacks.AsyncWorkers(
            rule or "delta",
            period=period if period == "auto" else int(period),
            timeout_seconds=SERVICE_SECONDS,
            on_service_loss="continue" if options.alone else "raise",
            roles="auto" if options.mode == "auto" else "tf_config",
        )
    ]
    if options.mode in ("auto", "balanced"):
        callbacks.append(keras_het.callbacks.BatchBalancer())
    batches = task.batches(BATCH)
    if options.late and strategy.is_async_worker:
        wait_for(options.result.with_suffix(".steps"), options.late)
    else:
        meeting = [] if options.late else [Meeting()]
        model.fit(batches.take(WARM_UP_BATCHES), verbose=0, callbacks=[*callbacks, *meeting])
    model.set_weights(first_weights)
    for variable in model.optimizer.variables:
        if variable.name not in ("iteration", "learning_rate"):
            variable.assign(variable * 0)
    model.fit(batches, verbose=0, callbacks=[*callbacks, clock])
    if tells:
        reached = [when for when, weights in clock.seen if task.accuracy(weights) >= TARGET]
        steps = [after - before for before, after in itertools.pairwise(clock.ends)]
        result = {
            "seconds": reached[0] if reached else None,
            "samples_per_s": options.samples / (clock.ends[-1] - clock.ends[0]),
            "last_accuracy": task.accuracy(model.get_weights()),
            "steps": steps,
        }
        if options.mode == "auto":  # nothing is reported if all stay in the sync group
            result["chosen"] = os.environ.get(CHOSEN_ROLES) or "balanced"
        temporary = options.result.with_suffix(".tmp")
        temporary.write_text(json.dumps(result))
        temporary.replace(options.result)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--samples", type=int)
    parser.add_argument("--result", type=Path)
    parser.add_argument("--late", type=int, help="step of the group at which an async one joins")
    parser.add_argument("--alone", action="store_true", help="train on where the service is lost")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
