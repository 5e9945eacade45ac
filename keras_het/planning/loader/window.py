"""Measurements over a few steps, and the choice of the steps to measure."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class LoaderWindow:
    """Sums over a few consecutive steps under one plan.

    Args:
        steps: number of steps.
        seconds: their duration, from one step's request for its batch to the next step's request.
        input_wait_seconds: the part of it in which the device waited for a batch.
        idle_cpus: average number of the host's CPUs that this process may use and that were idle.
        loader_cpu_seconds: CPU time of the pipeline's own threads; None if unknown.
        batch_bytes: size of a batch, 0 if unknown.
        waiting_steps: number of steps that waited for 5 % of their time or more; None if unknown.
        loader_queue_seconds: time in which the pipeline's own threads were runnable but waited for
            a CPU; None if unknown.

    Raises:
        ValueError: if there is no step, or no time.
    """

    steps: int
    seconds: float
    input_wait_seconds: float
    idle_cpus: float
    loader_cpu_seconds: float | None = None
    batch_bytes: int = 0
    waiting_steps: int | None = None
    loader_queue_seconds: float | None = None

    def __post_init__(self) -> None:
        if self.steps < 1 or not self.seconds > 0:
            raise ValueError(
                "A window needs at least one step and a time above zero. Received: "
                f"steps={self.steps}, seconds={self.seconds}."
            )

    @property
    def steps_per_second(self) -> float:
        """Throughput, X."""
        return self.steps / self.seconds

    @property
    def idle_fraction(self) -> float:
        """Fraction of the time in which the device waited for data."""
        return min(self.input_wait_seconds / self.seconds, 1.0)

    @property
    def wait_per_step(self) -> float:
        """Mean time in seconds that a step waited for its batch."""
        return self.input_wait_seconds / self.steps

    @property
    def waits_unevenly(self) -> bool:
        """Whether some of the steps found a batch ready: supply is sufficient between bursts."""
        if self.waiting_steps is None:
            return False
        return self.steps - self.waiting_steps >= max(self.steps / 4, 2)

    @property
    def device_seconds(self) -> float:
        """Time of a step with its batch at hand, T."""
        return max(self.seconds - self.input_wait_seconds, 0.0) / self.steps


@dataclasses.dataclass(frozen=True)
class WindowSize:
    """The steps that the next window covers.

    Args:
        skip_steps: number of steps to skip: their batches were ready before the plan was in effect.
        min_steps: smallest number of steps of a window.
        min_seconds: shortest duration of a window.
    """

    skip_steps: int
    min_steps: int
    min_seconds: float


class StepSums:
    """Collection of steps until a window is full; called in every step, so it only adds.

    Args:
        size: the steps that the first window covers.
    """

    def __init__(self, size: WindowSize) -> None:
        self.begin(size)

    def begin(self, size: WindowSize) -> None:
        """Start a new window."""
        self._skip = size.skip_steps
        self._min_steps, self._min_seconds = size.min_steps, size.min_seconds
        self.steps = self.waiting_steps = 0
        self.seconds = self.input_wait_seconds = 0.0
        self.is_skipping = size.skip_steps > 0

    def pause(self, steps: int) -> None:
        """Skip steps, for instance the first ones of an epoch, and then continue.

        Args:
            steps: number of steps to skip.
        """
        self._skip = max(self._skip, steps)
        self.is_skipping = self._skip > 0

    def add(self, seconds: float, input_wait_seconds: float, steps: int = 1) -> bool:
        """Add one step, or several that ran at once; return whether the window is full.

        Args:
            seconds: duration of the steps.
            input_wait_seconds: the part of it in which they waited for their batches.
            steps: number of steps.
        """
        if self._skip > 0:
            self._skip -= steps
            self.is_skipping = self._skip > 0
            return False
        self.steps += steps
        self.seconds += seconds
        self.input_wait_seconds += input_wait_seconds
        self.waiting_steps += steps if input_wait_seconds > 0.05 * seconds else 0
        return self.steps >= self._min_steps and self.seconds >= self._min_seconds
