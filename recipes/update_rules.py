"""Train with an update rule on three real worker processes, and on one device: same accuracy?

    python recipes/update_rules.py --rule diloco [--seeds 3]
    python recipes/update_rules.py --rule all
    python recipes/update_rules.py --rule async_sgd --validate --try '{"period": 2}'

Handwritten digits, emulated devices of speed 2:1:1. Synchronous rules run in LocalTraining: all
three workers take local steps and exchange at once. Asynchronous ones run in AsyncWorkers: the
fast worker trains and hosts the parameter service, the slow ones exchange with it whenever they are
ready. If workers wait for their turn, the first process only holds the service. Prints the test
accuracy, mean of the seeds. A rule takes about a minute. `--validate` trains without 287 of the
training images and prints the accuracy on those, for choosing settings (`--try` replaces some)
without a look at the test data.
"""

import argparse
import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

SPEEDS = (2.0, 1.0, 1.0)
SECONDS_PER_SAMPLE = 0.0002  # of a device of speed 1
BATCH_SIZE = 32
EPOCHS = 32
HIDDEN = 32


@dataclass(frozen=True)
class Setting:
    """Training setup of a rule.

    Args:
        rule: name of the rule.
        rate: learning rate of the workers; not used by rules that send gradients.
        momentum: momentum of the workers, likewise.
        config: settings of the rule.
        period: steps between two exchanges, or "auto", for asynchronous rules; synchronous ones
            have it as a setting.
        kind: "local", "hybrid", or "service" if workers wait for each other's turn.
    """

    rule: str = ""
    rate: float = 0.1
    momentum: float = 0.9
    config: dict[str, Any] = field(default_factory=dict)
    period: int | str = 4
    kind: str = "hybrid"


NUM_VALIDATION = 287  # the rest of the training data are 1150
ONE_DEVICE = Setting()
SCALED = {"learning_rate": 0.15, "reference_batch_size": BATCH_SIZE, "warmup_pushes": 100}
DAMPED = {"learning_rate": 0.3, "momentum": 0.5, "staleness_damping": True}
ADAM = {"optimizer": {"class_name": "Adam", "config": {"learning_rate": 0.006}}}
ADAPTIVE = {"learning_rate": 0.2, "compensation": 2.0, "decay": 0.95}
CONSTANT = {"learning_rate": 0.5, "compensation": 0.04}
# Chosen by hand from a few values; by `--validate` if benchmarks/results/update_rules.md says so.
SETTINGS = {
    "sync_easgd": Setting(
        "sync_easgd", 0.6, 0.0, {"num_workers": 3, "period": 2, "overlap": 1}, kind="local"
    ),
    "diloco": Setting("diloco", 0.3, 0.0, {"period": 5}, kind="local"),
    "delta": Setting("delta", 0.2, 0.0),
    "delayed_nesterov": Setting("delayed_nesterov", 0.6, 0.0, {"period": 5}, "auto"),
    "async_sgd": Setting("async_sgd", config=SCALED, period=2),
    "async_sgd_staleness": Setting("async_sgd", config=DAMPED, period=1),
    "async_sgd_adam": Setting("async_sgd", config=ADAM, period=2),
    "delay_compensated": Setting("delay_compensated", config=ADAPTIVE, period=1),
    "delay_compensated_constant": Setting("delay_compensated", config=CONSTANT, period=1),
    "async_easgd": Setting("async_easgd", 0.6, 0.0),
    "async_measgd": Setting("async_measgd", 0.15, 0.9),
    "hogwild_easgd": Setting("hogwild_easgd", 0.8, 0.0),
    "round_robin_easgd": Setting("round_robin_easgd", 0.6, 0.0, period=2, kind="service"),
}


def train(directory: Path, rule: str, setting: Setting, seeds: list[int], validates: bool) -> None:
    """Train; every worker runs this same script."""
    if setting.kind == "service":
        hold_the_service_in_the_first_task()
    import keras
    from digits import NUM_CLASSES, global_batches, load_digits
    from workers import save

    import keras_het

    (images, labels), test = load_digits()
    if validates:
        test = images[-NUM_VALIDATION:], labels[-NUM_VALIDATION:]
        images, labels = images[:-NUM_VALIDATION], labels[:-NUM_VALIDATION]
    is_local = rule in SETTINGS and setting.kind == "local"
    strategy = keras_het.HeterogeneousStrategy(share_weights=SPEEDS if is_local else None)
    for seed in seeds:
        keras.utils.set_random_seed(seed)
        with strategy.scope():
            layers = [keras.layers.Dense(HIDDEN, "gelu"), keras.layers.Dense(NUM_CLASSES)]
            model = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), *layers])
            model.compile(
                keras.optimizers.SGD(setting.rate, momentum=setting.momentum),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                metrics=["accuracy"],
            )
        batches = global_batches(images, labels, BATCH_SIZE)
        callbacks = [callback(setting)] if rule in SETTINGS else []
        model.fit(batches, epochs=EPOCHS, verbose=0, callbacks=callbacks)
        if strategy.is_async_worker:
            continue
        accuracy = model.evaluate(*test, batch_size=120, verbose=0, return_dict=True)["accuracy"]
        if strategy.is_chief:
            save(directory, f"{rule}-{seed}", {"accuracy": float(accuracy)}, [])


def callback(setting: Setting) -> Any:
    """Return the callback that trains by the rule."""
    import keras_het

    named = {"class_name": setting.rule, "config": setting.config}
    if setting.kind == "local":
        return keras_het.callbacks.LocalTraining(named)
    return keras_het.callbacks.AsyncWorkers(named, period=setting.period)


def hold_the_service_in_the_first_task() -> None:
    """Make the first worker a task of the job `ps`: without a sync group every worker may wait."""
    config = json.loads(os.environ["TF_CONFIG"])
    config["cluster"]["ps"] = config["cluster"].pop("worker")
    if config["task"]["type"] == "worker":
        config["task"]["type"] = "ps"
    os.environ["TF_CONFIG"] = json.dumps(config)


def accuracies(console: Console, rule: str, setting: Setting, options: Any) -> list[float]:
    """Return the accuracy for each seed."""
    from workers import run_workers

    from keras_het.launch.local.worker_environment import Emulation

    is_hybrid = rule in SETTINGS and setting.kind != "local"
    seeds = options.seeds
    speeds = SPEEDS if rule in SETTINGS else SPEEDS[:1]
    emulation = Emulation(speeds, seconds_per_sample=SECONDS_PER_SAMPLE)
    # a parameter service lives as long as its process: one start for each seed
    starts = [[seed] for seed in range(seeds)] if is_hybrid else [list(range(seeds))]
    found = []
    for own in starts:
        names = [f"{rule}-{seed}" for seed in own]
        arguments = ["--worker", "--rule", rule, "--of-seeds", ",".join(map(str, own))]
        arguments += ["--try", json.dumps(options.replaced)] if rule in SETTINGS else []
        arguments += ["--validate"] if options.validate else []
        num_async_workers = len(SPEEDS) - 1 if is_hybrid else 0
        results = run_workers(
            console,
            Path(__file__),
            arguments,
            emulation,
            names,
            num_async_workers=num_async_workers,
        )
        found += [numbers["accuracy"] for numbers, _ in results]
    return found


def compare(rules: list[str], options: Any) -> None:
    console = Console()
    speeds = ":".join(f"{speed:g}" for speed in SPEEDS)
    console.print(f"EMULATED devices of speed {speeds}; mean of {options.seeds} seed(s)")
    data = "validation" if options.validate else "test"
    name = Column("rule", overflow="fold")
    table = Table(name, "kind", f"{data} accuracy", "behind one device", "each seed")
    one_device = accuracies(console, "one device", ONE_DEVICE, options)
    for rule in ["one device", *rules]:
        setting = setting_of(rule, options)
        own = rule == "one device"
        found = one_device if own else accuracies(console, rule, setting, options)
        mean = 100 * sum(found) / len(found)
        behind = 100 * sum(one_device) / len(one_device) - mean
        table.add_row(
            rule,
            "" if own else setting.kind,
            f"{mean:.2f} %",
            "" if own else f"{behind:+.2f}",
            " ".join(f"{100 * accuracy:.1f}" for accuracy in found),
        )
    console.print(table)


def setting_of(rule: str, options: Any) -> Setting:
    """Return the setting of a rule, with the values given on the command line."""
    setting = SETTINGS.get(rule, ONE_DEVICE)
    changed = dict(options.replaced) if rule in SETTINGS else {}
    config = {**setting.config, **changed.pop("config", {})}
    return replace(setting, config=config, **changed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rule", default="diloco", choices=[*SETTINGS, "all", "one device"])
    parser.add_argument("--seeds", type=int, default=1, help="trainings of each kind")
    parser.add_argument("--validate", action="store_true", help="leave the test data alone")
    parser.add_argument(
        "--try", dest="replaced", type=json.loads, default={}, help="JSON of other settings"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--of-seeds", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        seeds = [int(seed) for seed in options.of_seeds.split(",")]
        setting = setting_of(options.rule, options)
        train(options.directory, options.rule, setting, seeds, options.validate)
    else:
        compare(list(SETTINGS) if options.rule == "all" else [options.rule], options)


if __name__ == "__main__":
    main()
