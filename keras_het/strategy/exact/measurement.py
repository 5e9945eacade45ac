"""Times of one replica's step: absent from the graph where nobody asks for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from keras_het.strategy.exact.step import StepSpec
from keras_het.strategy.measure import emulated_device
from keras_het.strategy.measure.compute_times import ComputeTimes
from keras_het.strategy.measure.step_clock import StepClock
from keras_het.value_types import Leaf, Nest


class Measurement:
    """Clock of a step, and what it tells all workers with the sums of the step.

    It also makes the step last as long as that of an emulated device.
    """

    def __init__(self, spec: StepSpec, times: ComputeTimes, data: Nest) -> None:
        self._spec, self._times = spec, times
        self.clock = StepClock(data, spec.is_on_gpu)
        self.rows: Nest = self.clock.inputs
        """The batch, not before the clock has started."""
        self._waited: tf.Tensor | None = None
        # Squared norms of this replica's own mean gradient and of the global one, on request.
        self._own_square: tf.Tensor | None = None
        self._global_square: tf.Tensor | None = None
        self._sends_times = self._sends_phases = False

    def held(self, values: Sequence[Leaf]) -> list[Leaf]:
        """Return values when the emulated device would have computed them."""
        spec = self._spec
        if spec.emulated_device is None:
            return list(values)
        held, self._waited = emulated_device.held(
            spec.emulated_device, spec.replica_id, spec.samples, self.clock.start_time, values
        )
        return held

    def gradients_are_computed(self, gradients: Sequence[Leaf]) -> list[Leaf]:
        """Stop the clock, and return the gradients when an emulated device has computed them."""
        present = [gradient for gradient in gradients if gradient is not None]
        held = iter(self.held(present))
        # Emulated time ends here, not at the gate, which opens for all local replicas.
        self.clock.stop(present if self._waited is None else [self._waited])
        return [None if gradient is None else next(held) for gradient in gradients]

    def add_own_square(self, square: Callable[[], tf.Tensor]) -> None:
        if self._measures_squares:
            self._own_square = _plus(self._own_square, square())

    def add_global_square(self, square: Callable[[], tf.Tensor]) -> None:
        if self._measures_squares:
            self._global_square = _plus(self._global_square, square())

    @property
    def _measures_squares(self) -> bool:
        return self._spec.is_timed and self._times.is_measuring_gradients

    def summands(self) -> list[tf.Tensor]:
        """What this replica measured, to be summed over all; nothing without gradients."""
        spec, seconds = self._spec, self.clock.seconds
        if not spec.is_timed or seconds is None:
            return []
        self._sends_times = self._times.is_measuring
        self._sends_phases = self._times.phases.is_measuring
        summands = []
        if self._sends_times:
            own = (spec.replica_id, spec.sizes, seconds, self._own_square)
            summands.append(self._times.contribution(*own))
        if self._sends_phases:
            phases = self._times.phases
            summands.append(phases.contribution(spec.replica_id, spec.local_position))
        return summands

    def record(self, sums: Sequence[tf.Tensor]) -> None:
        spec, clock, phases = self._spec, self.clock, self._times.phases
        is_first = spec.local_position == 0
        if self._sends_times and is_first:
            waited = clock.seconds_since_stop(sums[:1])
            self._times.record(spec.sizes, sums[0], waited, self._global_square)
        if self._sends_phases:
            if is_first:
                phases.record(sums[-1])
            phases.finish_step(
                spec.local_position,
                spec.samples,
                clock.seconds,
                clock.seconds_in_collectives(),
                clock.end_of_collectives,
            )


def _plus(sum_so_far: tf.Tensor | None, value: tf.Tensor) -> tf.Tensor:
    return value if sum_so_far is None else sum_so_far + value
