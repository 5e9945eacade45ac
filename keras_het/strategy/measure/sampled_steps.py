"""Measured steps among plain ones, on devices that work ahead of their hosts.

A measured step reads the clock when its device has computed, so that its host cannot queue the next
step meanwhile. The train function therefore exists twice, and only few steps run the measured one.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import tensorflow as tf

from keras_het.fit.session import Batches, FitSession, Rank, StepFunction
from keras_het.planning.measuring_schedule import MeasuringCost, MeasuringSchedule
from keras_het.strategy.measure.emulated_device import until_computed
from keras_het.strategy.measure.late_reads import LAG, LateReads, Read
from keras_het.value_types import Nest

if TYPE_CHECKING:
    from keras_het.strategy.heterogeneous_strategy import HeterogeneousStrategy

_MEASURED = "_keras_het_measured"


class _Call(NamedTuple):
    """A call of the train function: whether it was measured, and when each batch arrived."""

    was_measured: bool
    arrivals: list[tuple[float, float]]


# What a worker notices, and what the chief can afford, travels with the flags of `StopRequest`.
class SampledSteps:
    """The steps of a `fit`, of which a schedule measures some."""

    def __init__(
        self,
        strategy: HeterogeneousStrategy,
        session: FitSession,
        earlier: SampledSteps | None = None,
    ) -> None:
        self.schedule = MeasuringSchedule()
        self.was_measured = False
        """Whether the latest execution was measured."""
        self.latest_length = 0
        """Steps of the latest execution."""
        self.model, self._strategy = session.model, strategy
        self._cost = MeasuringCost()
        if earlier is not None and earlier.model is self.model:
            self.schedule.interval, self._cost = earlier.schedule.interval, earlier._cost
        self._cost.restart()
        self._reads = LateReads(LAG, until_computed)
        self._calls: deque[_Call] = deque()
        self._arrivals: list[tuple[float, float]] = []
        self._starved, self._num_steps, self._is_in_call = 0.0, 0, False
        self._latest_end: float | None = None
        self._sees_change = False
        session.add_layer(Rank.SAMPLE_STEPS, self._run)
        session.before_callbacks("on_epoch_begin", lambda *_: self._pause())

    @property
    def flags(self) -> tuple[float, float]:
        """Whether this worker wants to measure closely, and the chief's interval, 0 for none."""
        interval = self._cost.interval if self._strategy.is_chief else 0
        return float(self._sees_change), float(interval)

    def ask(self) -> None:
        """Ask all workers to measure the next steps one by one."""
        self._sees_change = True

    def agree(self, num_requests: float, interval: float) -> None:
        """Follow what all workers have learned of each other's flags; after the same step."""
        if num_requests:
            self.schedule.watch_closely()
            self._cost.restart()
            self._sees_change = False
        if interval:
            self.schedule.interval = int(interval)

    def _pause(self) -> None:
        """Leave out the time until the next step: it belongs to a validation."""
        self._note_ends(self._reads.take(all_of_them=True))
        self._latest_end = None
        self._cost.restart()

    def _run(self, function: StepFunction, batches: Batches) -> Nest:
        times = self._strategy.extended.compute_times
        phases = times.phases
        self.was_measured = self.schedule.is_due or times.is_measuring_gradients
        if self.was_measured:
            function = self._measured(function)
            mean = self._starved / max(self._num_steps, 1)
            phases.note_input_wait(mean, of_each_later=mean)
            self._starved, self._num_steps = 0.0, 0
        times.is_sampled_out = not self.was_measured  # what a trace reads
        self._is_in_call = True
        try:
            result = function(batches)
        finally:
            times.is_sampled_out = self._is_in_call = False
        self.schedule.step_ended()
        if self.was_measured and (steps := times.latest(1)):
            self.schedule.observe(steps[-1].shares, steps[-1].seconds)
        self.latest_length = max(len(self._arrivals), 1)
        if phases.is_measuring:
            phases.count_steps(self.latest_length, self.was_measured)
        self._calls.append(_Call(self.was_measured, self._arrivals))
        self._arrivals = []
        logs = [leaf for leaf in tf.nest.flatten(result) if tf.is_tensor(leaf)]
        self._reads.add(logs[-1] if logs else self.model.optimizer.iterations.value)
        self._note_ends(self._reads.take())
        if self._strategy.num_workers == 1:
            self.agree(*self.flags)
        return result

    def _measured(self, plain: StepFunction) -> StepFunction:
        """Return the measured train function that belongs to a plain one."""
        known = vars(self.model).setdefault(_MEASURED, weakref.WeakKeyDictionary())
        if plain not in known:
            self.model.make_train_function(force=True)
            known[plain] = vars(self.model)["train_function"]
            vars(self.model)["train_function"] = plain
        return known[plain]

    def batch_arrives(self, waited: float) -> None:
        """Note that a batch arrives now, for which the host waited some seconds."""
        if self._is_in_call:  # else of a validation
            self._arrivals.append((time.perf_counter(), waited))

    def _note_ends(self, reads: Iterable[Read]) -> None:
        for _, end in reads:
            call, before = self._calls.popleft(), self._latest_end
            self._latest_end = end
            self._num_steps += max(len(call.arrivals), 1)
            for arrival, waited in call.arrivals[-1:]:  # if drawn together, that of all
                # a device that still computes the step before does not wait
                self._starved += min(waited, max(arrival - before, 0.0)) if before else waited
            if before is not None and self._cost.observe(call.was_measured, end - before):
                self._sees_change = True
