"""When which fragment of a model is exchanged."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import tensorflow as tf

from keras_het.asynchronous.rules import SynchronousRule
from keras_het.local_training.fragment import Fragment
from keras_het.local_training.packed_variables import PackedVariables
from keras_het.training_strategy import TrainingStrategy

_PREFIX = "local_training/"


class PeriodicExchange:
    """Exchanges between workers that train on their own, as a synchronous rule says.

    All workers call its methods after the same steps. Sums run in one background thread, one after
    the other, so that they begin in the same order everywhere; nobody waits for a sum before the
    step at which the rule merges it.

    Args:
        model: a built model.
        strategy: its `HeterogeneousStrategy`.
        rule: the synchronous rule.

    Raises:
        ValueError: if nothing is trained.
    """

    def __init__(self, model: Any, strategy: TrainingStrategy, rule: SynchronousRule) -> None:
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
        """Merges and begins the exchanges that are due.

        Args:
            steps: local steps since the last call; several if a call of the train function runs
                several, after which the exchange begins that was due at one of them.
            samples: that this worker used in them.
        """
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
        """Waits for the sums that are on their way, so that other collectives may follow."""
        for fragment in self.fragments:
            fragment.wait()

    def show_center(self) -> None:
        """Gives the model the center, to be evaluated or saved; idempotent."""
        self.wait()
        for fragment in self.fragments:
            fragment.show_center()

    def hide_center(self) -> None:
        """Gives the model this worker's own weights back."""
        for fragment in self.fragments:
            fragment.hide_center()

    def end(self) -> None:
        """Exchanges what was trained since the last exchange; the model has the center then."""
        self.hide_center()
        for fragment in self.fragments:
            fragment.merge()
            if fragment.steps:
                self._start(fragment)
                fragment.merge()
        self.show_center()
        self._executor.shutdown()

    def saved(self) -> dict[str, np.ndarray]:
        """What a backup keeps beside the model's weights: name to array."""
        found = {f"{_PREFIX}step": np.array(self._step, np.int64)}
        for number, fragment in enumerate(self.fragments):
            for name, value in fragment.saved().items():
                found[f"{_PREFIX}{number}/{name}"] = value
        return found

    def restore(self, saved: Mapping[str, np.ndarray]) -> None:
        """Goes on from a backup, whose weights the model has already.

        Args:
            saved: what `saved` gave on the chief.

        Raises:
            ValueError: if it is that of another model or rule.
        """
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
