"""The exchanges of a model between workers that train on their own."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
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
_STATE = f"{_PREFIX}state/"
_COUNTS, _PENDING = f"{_PREFIX}counts", f"{_PREFIX}pending"


@dataclasses.dataclass
class _Pending:
    """An exchange in flight."""

    sent: tuple[tf.Tensor, tf.Tensor]
    due: int
    combined: Future[tuple[tf.Tensor, tf.Tensor]]


class PeriodicExchange:
    """Exchanges between workers that train independently, on the schedule of a synchronous rule."""

    # Sums run in one background thread, and therefore begin in the same order everywhere; no worker
    # waits for a sum before the step at which the rule merges it.
    # Moving statistics s_i travel with the weights and become their mean over the samples n_i since
    # the last exchange, sum(n_i s_i) / sum(n_i). What no worker has changed keeps its bits.

    def __init__(
        self, model: keras.Model, strategy: HeterogeneousStrategy, rule: SynchronousRule
    ) -> None:
        variables, statistics = shared_variables(model)
        self._strategy, self._rule = strategy, rule
        self._weights = PackedVariables(variables, strategy)
        self._statistics = PackedVariables(statistics, strategy)
        self.num_exchanges = 0
        self.pace = Pace()
        self._paces: np.ndarray | None = None  # samples of all workers, then their seconds
        self._latest_paces: np.ndarray | None = None
        self._pending: _Pending | None = None
        self._own: tuple[tf.Tensor, tf.Tensor] | None = None
        self._step = 0
        self._samples = self._steps = 0  # since the last exchange
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="keras_het_exchange")
        # All workers start from the same bits, wherever their weights come from.
        for each in (self._weights, self._statistics):
            adopt_vector_of_the_chief(each, strategy)
        self.state = rule.initial_state(self._weights.read())
        self._mean_statistics = mean = self._statistics.read()
        # Traced here: in the background, the order of tracing, and of keys, would be random.
        combine = tf.function(self._combine, autograph=False)
        self._exchange = combine.get_concrete_function(
            self.center, mean, mean, tf.constant(0.0), self._own_pace(0), self.state
        )

    def steps_done(self, steps: int, samples: int) -> None:
        self.pace.steps_done(samples)
        passed = range(self._step + 1, self._step + steps + 1)
        self._step += steps
        self._samples += samples
        self._steps += steps
        self._merge_if_due()
        if any(self._rule.is_due(step) for step in passed):
            self._start()

    def _start(self) -> None:
        self._merge()
        sent = self._weights.read(), self._statistics.read()
        samples = tf.constant(float(self._samples), tf.float32)
        self._samples = self._steps = 0
        combined = self._executor.submit(self._run, sent, samples, self.pace.take_samples())
        self._pending = _Pending(sent, self._step + self._rule.overlap, combined)
        self.num_exchanges += 1
        self._merge_if_due()

    def take_paces(self) -> tuple[list[float], list[float]] | None:
        """Return samples and seconds of each worker, if an exchange has just brought them."""
        found, self._paces = self._paces, None
        if found is None:
            return None
        samples, seconds = np.split(found.astype(np.float64), 2)
        return samples.tolist(), seconds.tolist()

    def exchange_remaining(self) -> None:
        """Exchange the steps since the last exchange, unless a period has just ended."""
        if self._step % self._rule.period:
            self._exchange_now()

    def end(self) -> None:
        """Exchange the progress since the last exchange and leave the center in the model."""
        self._exchange_now()
        self.show_center()
        self._executor.shutdown()

    def _exchange_now(self) -> None:
        self.hide_center()
        self._merge()
        if self._steps:
            self._start()
            self._merge()

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
        found = np.zeros([2, self._strategy.num_workers], np.float32)
        found[:, self._strategy.worker_index] = samples, self.pace.take_seconds()
        return tf.constant(found.ravel())

    def _run(
        self, sent: tuple[tf.Tensor, tf.Tensor], samples: tf.Tensor, measured: int
    ) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.device("CPU:0"):  # as soon as the device has computed them
            own = [tf.identity(each) for each in sent]
        last_mean, pace = self._mean_statistics, self._own_pace(measured)
        with self._strategy.extended.naming_lost_workers():
            weights, mean, paces, self.state = self._exchange(
                *own, last_mean, samples, pace, self.state
            )
        self._mean_statistics, self._latest_paces = mean, np.asarray(paces)
        return weights, mean

    def wait(self) -> None:
        """Wait for the sum in flight, which must finish before other collectives."""
        if self._pending is not None:
            self._pending.combined.result()

    def _merge_if_due(self) -> None:
        """Continue from the result of an exchange, `overlap` steps after it began."""
        if self._pending is not None and self._step >= self._pending.due:
            self._merge()

    def _merge(self) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            return
        began = time.perf_counter()
        combined, mean = pending.combined.result()
        self.pace.leave_out(began)
        self._paces, self._latest_paces = self._latest_paces, None
        if self._steps == 0 and self._rule.center_is_weights:
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
        """Load the center into the model, for evaluation or saving; idempotent."""
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
        """State that a backup keeps in addition to the model's weights: name to array."""
        self.wait()
        found = {f"{_STATE}{name}": np.asarray(value) for name, value in self.state.items()}
        found[f"{_PREFIX}mean_statistics"] = np.asarray(self._mean_statistics)
        # A backup of the center has no steps since the exchange and nothing to merge with it.
        is_shown = self._own is not None
        since = [0, 0] if is_shown else [self._samples, self._steps]
        found[_COUNTS] = np.array([self._step, *since], np.int64)
        if self._pending is not None and not is_shown:
            parts = (*self._pending.sent, *self._pending.combined.result())
            found[_PENDING] = np.concatenate([np.asarray(part) for part in parts])
            found[f"{_PREFIX}due"] = np.array(self._pending.due, np.int64)
        return found

    def restore(self, saved: Mapping[str, np.ndarray]) -> None:
        """Continue from a backup whose weights the model already has."""
        if _COUNTS not in saved:
            raise ValueError(
                "The backup has no state of local training. Received: "
                f"{sorted(saved)}. Remove it, or train as it was made."
            )
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
        self._mean_statistics = tf.constant(saved[f"{_PREFIX}mean_statistics"])
        self._step, self._samples, self._steps = (int(number) for number in saved[_COUNTS])
        if _PENDING in saved:
            sizes = 2 * [self._weights.size, self._statistics.size]
            weights, statistics, *combined = tf.split(tf.constant(saved[_PENDING]), sizes)
            done: Future[tuple[tf.Tensor, tf.Tensor]] = Future()
            done.set_result((combined[0], combined[1]))
            due = int(saved[f"{_PREFIX}due"])
            self._pending = _Pending((weights, statistics), due, done)
