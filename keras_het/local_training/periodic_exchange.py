"""Schedule of the exchanges of a model's fragments."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import tensorflow as tf

from keras_het.asynchronous.rules import SynchronousRule
from keras_het.local_training.fragment import Fragment
from keras_het.local_training.packed_variables import PackedVariables
from keras_het.training_strategy import TrainingStrategy

_PREFIX = "local_training/"


class PeriodicExchange:
    """Exchanges between workers that train independently, on the schedule of a synchronous rule.

    All workers call its methods after the same steps. Sums run in one background thread, one after
    another, and therefore begin in the same order everywhere; no worker waits for a sum before the
    step at which the rule merges it.
    """

    def __init__(
        self, model: keras.Model, strategy: TrainingStrategy, rule: SynchronousRule
    ) -> None:
        variables = list(model.trainable_variables)
        if not model.built or not variables:
            raise ValueError(
                "Weights are shared before the first step, and there are none. Received: a model "
                "that is not built or has nothing to train. Give it an Input, or call it once."
            )
        state = [v for v in model.non_trainable_weights if tf.as_dtype(v.dtype).is_floating]
        self._rule = rule
        self.num_exchanges = 0
        self._step = 0
        groups = rule.fragments([int(np.prod(variable.shape)) for variable in variables])
        self.fragments = [
            Fragment(
                strategy,
                rule,
                PackedVariables([variables[number] for number in group], strategy),
                PackedVariables([] if place else state, strategy),
            )
            for place, group in enumerate(groups)
        ]
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="keras_het_exchange")

    def steps_done(self, steps: int, samples: int) -> None:
        """Merge and start the exchanges that are due."""
        passed = range(self._step + 1, self._step + steps + 1)
        self._step += steps
        for fragment in self.fragments:
            fragment.samples += samples
            fragment.steps += steps
            fragment.merge_if_due(self._step)
        for number, fragment in enumerate(self.fragments):
            if any(self._rule.is_due(step, number, len(self.fragments)) for step in passed):
                self._start(fragment)

    def _start(self, fragment: Fragment) -> None:
        fragment.merge()
        fragment.start(self._executor, self._step)
        self.num_exchanges += 1
        fragment.merge_if_due(self._step)

    def wait(self) -> None:
        """Wait for the sums in flight, which must finish before other collectives."""
        for fragment in self.fragments:
            fragment.wait()

    def show_center(self) -> None:
        """Load the center into the model, for evaluation or saving; idempotent."""
        self.wait()
        for fragment in self.fragments:
            fragment.show_center()

    def hide_center(self) -> None:
        """Restore this worker's own weights in the model."""
        for fragment in self.fragments:
            fragment.hide_center()

    def end(self) -> None:
        """Exchange the progress since the last exchange and leave the center in the model."""
        self.hide_center()
        for fragment in self.fragments:
            fragment.merge()
            if fragment.steps:
                self._start(fragment)
                fragment.merge()
        self.show_center()
        self._executor.shutdown()

    def saved(self) -> dict[str, np.ndarray]:
        """State that a backup keeps in addition to the model's weights: name to array."""
        found = {f"{_PREFIX}step": np.array(self._step, np.int64)}
        for number, fragment in enumerate(self.fragments):
            for name, value in fragment.saved().items():
                found[f"{_PREFIX}{number}/{name}"] = value
        return found

    def restore(self, saved: Mapping[str, np.ndarray]) -> None:
        """Continue from a backup whose weights the model already has."""
        if f"{_PREFIX}step" not in saved:
            raise ValueError(
                "The backup has no state of local training. Received: "
                f"{sorted(saved)}. Remove it, or train as it was made."
            )
        self._step = int(saved[f"{_PREFIX}step"])
        for number, fragment in enumerate(self.fragments):
            prefix = f"{_PREFIX}{number}/"
            own = {n.removeprefix(prefix): v for n, v in saved.items() if n.startswith(prefix)}
            fragment.restore(own)
