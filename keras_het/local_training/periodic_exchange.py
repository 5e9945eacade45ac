"""The exchanges of a model's fragments between workers that train on their own."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import keras
import numpy as np
import tensorflow as tf

from keras_het.local_training.local_steps import Pace, adopt_vector_of_the_chief
from keras_het.packed_variables import PackedVariables, shared_variables
from keras_het.rules import SynchronousRule

if TYPE_CHECKING:
    from keras_het.strategy.heterogeneous_strategy import HeterogeneousStrategy

_PREFIX = "local_training/"
_STATE = "state/"


class PeriodicExchange:
    """Exchanges between workers that train independently, on the schedule of a synchronous rule."""

    # Sums run in one background thread, and therefore begin in the same order everywhere; no worker
    # waits for a sum before the step at which the rule merges it.

    def __init__(
        self, model: keras.Model, strategy: HeterogeneousStrategy, rule: SynchronousRule
    ) -> None:
        variables, state = shared_variables(model)
        self._rule = rule
        self.num_exchanges = 0
        self.pace = Pace()
        self._step = 0
        groups = rule.fragments([int(np.prod(variable.shape)) for variable in variables])
        self.fragments = [
            Fragment(
                strategy,
                rule,
                PackedVariables([variables[number] for number in group], strategy),
                PackedVariables([] if place else state, strategy),
                None if place else self.pace,
            )
            for place, group in enumerate(groups)
        ]
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="keras_het_exchange")

    def steps_done(self, steps: int, samples: int) -> None:
        self.pace.steps_done(samples)
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

    def take_paces(self) -> tuple[list[float], list[float]] | None:
        """Return samples and seconds of each worker, if an exchange has just brought them."""
        fragment = self.fragments[0]
        found, fragment.paces = fragment.paces, None
        if found is None:
            return None
        samples, seconds = np.split(found.astype(np.float64), 2)
        return samples.tolist(), seconds.tolist()

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
        for fragment in self.fragments:
            fragment.hide_center()

    def exchange_remaining(self) -> None:
        """Exchange the steps since the last exchange, unless a period has just ended."""
        if self._step % self._rule.period:
            self._exchange_all()

    def end(self) -> None:
        """Exchange the progress since the last exchange and leave the center in the model."""
        self._exchange_all()
        self.show_center()
        self._executor.shutdown()

    def _exchange_all(self) -> None:
        self.hide_center()
        for fragment in self.fragments:
            fragment.merge()
            if fragment.steps:
                self._start(fragment)
                fragment.merge()

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


@dataclasses.dataclass
class _Pending:
    """An exchange in flight."""

    sent: tuple[tf.Tensor, tf.Tensor]
    due: int
    combined: Future[tuple[tf.Tensor, tf.Tensor]]


class Fragment:
    """Variables exchanged together, in one packed sum over the workers."""

    # Moving statistics s_i travel with them and become their mean over the samples n_i since the
    # last exchange, sum(n_i s_i) / sum(n_i). What no worker has changed keeps its bits.

    def __init__(
        self,
        strategy: HeterogeneousStrategy,
        rule: SynchronousRule,
        weights: PackedVariables,
        statistics: PackedVariables,
        pace: Pace | None = None,
    ) -> None:
        self._strategy, self._rule, self._pace = strategy, rule, pace
        self.paces: np.ndarray | None = None
        """Samples of all workers since the exchange before, then their seconds; float32 [2 W]."""
        self._latest_paces: np.ndarray | None = None
        self._weights, self._statistics = weights, statistics
        self._pending: _Pending | None = None
        self._own: tuple[tf.Tensor, tf.Tensor] | None = None
        self.samples = 0
        self.steps = 0
        # All workers start from the same bits, wherever their weights come from.
        adopt_vector_of_the_chief(weights, strategy)
        adopt_vector_of_the_chief(statistics, strategy)
        self.state = rule.initial_state(weights.read())
        self._mean_statistics = statistics.read()
        # Traced here: in the background, the order of tracing, and of keys, would be random.
        combine = tf.function(self._combine, autograph=False)
        statistics = self._mean_statistics
        self._exchange = combine.get_concrete_function(
            self.center, statistics, statistics, tf.constant(0.0), self._own_pace(0), self.state
        )

    @property
    def center(self) -> tf.Tensor:
        return self.state["center"]

    def _combine(
        self,
        weights: tf.Tensor,
        statistics: tf.Tensor,
        last_mean: tf.Tensor,
        samples: tf.Tensor,
        pace: tf.Tensor,
        state: dict[str, tf.Tensor],
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, dict[str, tf.Tensor]]:
        mean, paces = statistics, pace

        def all_reduce_sum(vector: tf.Tensor) -> tf.Tensor:
            nonlocal mean, paces
            # Zero samples times infinity is not a number.
            own = tf.math.multiply_no_nan(statistics, samples)
            moved = samples * self._statistics.differ(statistics, last_mean)
            parts = [vector, own, moved, samples[None], pace]
            total = self._strategy.extended.sum_over_workers(tf.concat(parts, axis=0))
            sizes = [part.shape[0] for part in parts]
            summed, sums, moved, count, paces = tf.split(total, sizes)
            # Rounding can make the mean of equal numbers differ from them.
            mean = self._statistics.choose(moved > 0, tf.math.divide_no_nan(sums, count), last_mean)
            mean = tf.where(count > 0, mean, statistics)
            return summed

        with tf.device("CPU:0"):
            weights, state = self._rule.combine(weights, state, samples, all_reduce_sum)
        return weights, mean, paces, state

    def _own_pace(self, samples: int) -> tf.Tensor:
        """Return this worker's samples and seconds at its places in the list of all workers."""
        found = np.zeros([2, self._strategy.num_workers if self._pace else 0], np.float32)
        if self._pace is not None:
            found[:, self._strategy.worker_index] = samples, self._pace.take_seconds()
        return tf.constant(found.ravel())

    def start(self, executor: Executor, step: int) -> None:
        sent = self._weights.read(), self._statistics.read()
        samples = tf.constant(float(self.samples), tf.float32)
        self.samples = self.steps = 0
        measured = self._pace.take_samples() if self._pace else 0
        combined = executor.submit(self._run, sent, samples, measured)
        self._pending = _Pending(sent, step + self._rule.overlap, combined)

    def _run(
        self, sent: tuple[tf.Tensor, tf.Tensor], samples: tf.Tensor, measured: int
    ) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.device("CPU:0"):  # as soon as the device has computed them
            own = [tf.identity(each) for each in sent]
        last_mean, pace = self._mean_statistics, self._own_pace(measured)
        with self._strategy._naming_lost_workers():
            weights, mean, paces, self.state = self._exchange(
                *own, last_mean, samples, pace, self.state
            )
        self._mean_statistics, self._latest_paces = mean, np.asarray(paces)
        return weights, mean

    def wait(self) -> None:
        if self._pending is not None:
            self._pending.combined.result()

    def merge_if_due(self, step: int) -> None:
        """Continue from the result of an exchange, `overlap` steps after it began."""
        if self._pending is not None and step >= self._pending.due:
            self.merge()

    def merge(self) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            return
        began = time.perf_counter()
        combined, mean = pending.combined.result()
        if self._pace is not None:
            self._pace.leave_out(began)
            self.paces, self._latest_paces = self._latest_paces, None
        if self.steps == 0 and self._rule.center_is_weights:
            # Nothing to merge with: the result has exactly the same bits on all workers.
            self._weights.write(combined)
            self._statistics.write(mean)
            return
        sent, sent_statistics = pending.sent
        self._weights.write(self._rule.receive(self._weights.read(), sent, combined))
        now = self._statistics.read()
        # Exactly the mean if nothing has changed in the meantime; values may be infinite.
        self._statistics.write(
            tf.where(now == sent_statistics, mean, now + (mean - sent_statistics))
        )

    def show_center(self) -> None:
        if self._own is None:
            self.wait()
            self._own = self._weights.read(), self._statistics.read()
            self._weights.write(self.center)
            self._statistics.write(self._mean_statistics)

    def hide_center(self) -> None:
        own, self._own = self._own, None
        if own is not None:
            self._weights.write(own[0])
            self._statistics.write(own[1])

    def saved(self) -> dict[str, np.ndarray]:
        self.wait()
        found = {f"{_STATE}{name}": np.asarray(value) for name, value in self.state.items()}
        found["mean_statistics"] = np.asarray(self._mean_statistics)
        # A backup of the center has no steps since the exchange and nothing to merge with it.
        is_shown = self._own is not None
        found["since"] = np.array([0, 0] if is_shown else [self.samples, self.steps], np.int64)
        if self._pending is not None and not is_shown:
            parts = (*self._pending.sent, *self._pending.combined.result())
            found["pending"] = np.concatenate([np.asarray(part) for part in parts])
            found["due"] = np.array(self._pending.due, np.int64)
        return found

    def restore(self, saved: Mapping[str, np.ndarray]) -> None:
        state = {
            name.removeprefix(_STATE): tf.constant(value)
            for name, value in saved.items()
            if name.startswith(_STATE)
        }
        if {n: v.shape for n, v in state.items()} != {n: v.shape for n, v in self.state.items()}:
            raise ValueError(
                "The saved state of the update rule is that of another model or rule. Received: "
                f"{sorted(saved)}; expected: {sorted(self.state)} of the same shapes. Remove the "
                "backup, or use the model and rule that it was made with."
            )
        self.state = state
        self._mean_statistics = tf.constant(saved["mean_statistics"])
        self.samples, self.steps = (int(number) for number in saved["since"])
        if "pending" in saved:
            sizes = 2 * [self._weights.size, self._statistics.size]
            weights, statistics, *combined = tf.split(tf.constant(saved["pending"]), sizes)
            done: Future[tuple[tf.Tensor, tf.Tensor]] = Future()
            done.set_result((combined[0], combined[1]))
            self._pending = _Pending((weights, statistics), int(saved["due"]), done)
