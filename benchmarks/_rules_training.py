"""Task of the benchmark of update rules: trainings one after another, each timed to a target.

Two data sets for the same perceptron of 76,810 weights: noisy labels (see `_noisy_task`) and the
digits of scikit-learn. A first short `fit` traces and connects everything; each later one starts
from the weights of its seed and an optimizer without state, and is timed from its first step. One
worker keeps the center that it has seen every few steps; the first one that reaches the target,
evaluated afterwards, determines the time.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from _noisy_task import HIDDEN, NUM_CLASSES, NUM_INPUTS, NoisyTask

SPEEDS = (4.0, 2.0, 2.0, 2.0)
BATCH = 32  # of a worker's step; a synchronous step has this many for each worker on average
TARGETS = {"noisy": 0.8, "digits": 0.95}
SAMPLES, DIGITS_TRAIN, DIGITS_EPOCHS = 14_400, 1437, 10
WARM_UP_BATCHES, STEPS_BETWEEN_LOOKS = 32, 4
MOMENTUM, SERVICE_SECONDS = 0.9, 20.0


@dataclasses.dataclass(frozen=True)
class Setting:
    """How a rule trains.

    Args:
        rule: its name in the registry; empty for synchronous training.
        config: its settings, except the learning rate of rules that send gradients.
        momentum: whether there is one; learning rates are a tenth then.
        sends_gradients: whether the rate is the rule's and not the workers'.
        kind: "async" for `AsyncWorkers`, else "local" or "synchronous".
        period: steps of an async worker between two exchanges.
    """

    rule: str
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    momentum: bool = False
    sends_gradients: bool = False
    kind: str = "async"
    period: int | str = 1

    def rate(self, rate: float) -> float:
        """Return the learning rate for one without momentum."""
        return rate * (1 - MOMENTUM) if self.momentum else rate


SETTINGS = {
    "async_sgd": Setting("async_sgd", sends_gradients=True),
    "async_msgd": Setting("async_sgd", {"momentum": MOMENTUM}, True, sends_gradients=True),
    "hogwild_sgd": Setting("hogwild_sgd", sends_gradients=True),
    "async_easgd": Setting("async_easgd"),
    "async_measgd": Setting("async_measgd", momentum=True),
    "hogwild_easgd": Setting("hogwild_easgd"),
    "delta": Setting("delta"),
    "delay_compensated": Setting(
        "delay_compensated", {"compensation": 2.0, "decay": 0.95}, sends_gradients=True
    ),
    "delayed_nesterov": Setting("delayed_nesterov", {"period": 5}, period="auto"),
    "round_robin_easgd": Setting("round_robin_easgd"),
    "sync_easgd": Setting("sync_easgd", {"period": 1, "overlap": 1}, kind="local"),
    "diloco": Setting("diloco", {"period": 5}, kind="local"),
    "synchronous": Setting("", kind="synchronous"),
}
COUNTERPARTS = {
    "async_easgd": "async_sgd",
    "async_measgd": "async_msgd",
    "hogwild_easgd": "hogwild_sgd",
}
"""Compared by You, Buluc and Demmel, SC 2017."""


class Digits:
    """The digits of scikit-learn, with what `NoisyTask` has."""

    def __init__(self) -> None:
        import sklearn.datasets

        digits = sklearn.datasets.load_digits()
        order = np.random.default_rng(0).permutation(len(digits.target))
        inputs, labels = (digits.data / 16).astype(np.float32)[order], digits.target[order]
        self.inputs, self.labels = inputs[:DIGITS_TRAIN], labels[:DIGITS_TRAIN].astype(np.int64)
        self._test = inputs[DIGITS_TRAIN:], labels[DIGITS_TRAIN:]

    batches, accuracy = NoisyTask.batches, NoisyTask.accuracy


def register_hogwild_sgd() -> None:
    """Add gradient descent without a lock, to which the paper compares Hogwild EASGD."""
    from keras_het import rules

    class HogwildSGD(rules.AsyncSGD):
        """A gradient may meet a center that another has changed halfway."""

        name = "hogwild_sgd"
        is_atomic = False

        def update(self, center: Any, slots: Any, change: Any, meta: Any) -> Any:
            center -= np.float32(self.learning_rate) * change
            return rules.Update(center, slots, center.copy())

    rules.register_rule(HogwildSGD)


def callbacks_of(setting: Setting, rate: float) -> list[Any]:
    """Return what trains by the rule."""
    import keras_het

    if not setting.rule:
        return []
    config = {**setting.config, **({"learning_rate": rate} if setting.sends_gradients else {})}
    named = {"class_name": setting.rule, "config": config}
    if setting.kind == "local":
        return [keras_het.callbacks.LocalTraining(named)]
    return [
        keras_het.callbacks.AsyncWorkers(
            named, period=setting.period, timeout_seconds=SERVICE_SECONDS
        )
    ]


def center_of(callback: Any, model: Any) -> list[Any]:
    """Return the center's weights as the worker has seen them last."""
    participant, exchange = (getattr(callback, f"_{n}", None) for n in ("participant", "exchange"))
    if exchange is not None:
        vector = np.asarray(exchange.center)
    elif participant is not None and not participant.rule.center_is_weights:
        vector = np.concatenate(participant._engine.exchange.seen)
    else:
        return list(model.get_weights())
    sizes = [int(np.prod(weights.shape)) for weights in model.weights]
    parts = np.split(vector, np.cumsum(sizes)[:-1])
    return [
        part.reshape(tuple(weights.shape))
        for part, weights in zip(parts, model.weights, strict=True)
    ]


def train(options: argparse.Namespace) -> None:
    """Train once for each seed and write the measurements."""
    import keras

    import keras_het

    register_hogwild_sgd()
    setting = SETTINGS[options.rule]
    is_async = setting.kind == "async"
    strategy = keras_het.HeterogeneousStrategy(share_weights=None if is_async else list(SPEEDS))
    config = strategy.extended.cluster_config
    tells = (
        config.task_type == "async" and config.task_index == 0 if is_async else (strategy.is_chief)
    )
    rate = setting.rate(options.rate)
    with strategy.scope():
        layers = [keras.layers.Dense(HIDDEN, activation="relu"), keras.layers.Dense(NUM_CLASSES)]
        model = keras.Sequential([keras.Input((NUM_INPUTS,)), *layers])
        of_worker = MOMENTUM if setting.momentum and not setting.sends_gradients else 0.0
        model.compile(
            keras.optimizers.SGD(rate, momentum=of_worker),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    task = Digits() if options.task == "digits" else NoisyTask(SAMPLES)
    batches = task.batches(BATCH if is_async else BATCH * len(SPEEDS))
    epochs = DIGITS_EPOCHS if options.task == "digits" else 1
    if options.quick:
        batches, epochs = batches.take(WARM_UP_BATCHES), 1

    class Clock(keras.callbacks.Callback):
        """Times of the steps from the first one on, and the center every few steps."""

        def __init__(self, callback: Any) -> None:
            super().__init__()
            self._callback = callback
            self.ends: list[float] = []
            self.seen: list[tuple[float, list[Any]]] = []

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.ends.append(time.perf_counter())
            if tells and len(self.ends) % STEPS_BETWEEN_LOOKS == 0:
                center = center_of(self._callback, self.model)
                self.seen.append((self.ends[-1] - self.ends[0], center))

    results = []
    for seed in (None, *options.seeds):
        random = np.random.default_rng(seed or 0)
        model.set_weights(
            [
                random.uniform(-1, 1, w.shape) * np.sqrt(6 / sum(w.shape)) if w.ndim > 1 else 0 * w
                for w in model.get_weights()
            ]
        )
        for variable in model.optimizer.variables:
            if variable.name not in ("iteration", "learning_rate"):
                variable.assign(variable * 0)
        callbacks = callbacks_of(setting, rate)
        clock = Clock(callbacks[0] if callbacks else None)
        if seed is None:
            model.fit(batches.take(WARM_UP_BATCHES), verbose=0, callbacks=callbacks)
            continue
        model.fit(batches, epochs=epochs, verbose=0, callbacks=[*callbacks, clock])
        if tells:
            target = TARGETS[options.task]
            reached = [when for when, weights in clock.seen if task.accuracy(weights) >= target]
            total = epochs * len(batches) * (BATCH if is_async else BATCH * len(SPEEDS))
            results.append(
                {
                    "seconds": reached[0] if reached else None,
                    "last_accuracy": task.accuracy(model.get_weights()),
                    "samples_per_s": total / (clock.ends[-1] - clock.ends[0]),
                }
            )
    if tells:
        temporary = options.result.with_suffix(".tmp")
        temporary.write_text(json.dumps(results))
        temporary.replace(options.result)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rule", choices=SETTINGS)
    parser.add_argument("--task", choices=TARGETS)
    parser.add_argument("--rate", type=float)
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--result", type=Path)
    parser.add_argument("--quick", action="store_true")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
