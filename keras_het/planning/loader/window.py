"""What was measured over a few steps, and which steps are measured."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class LoaderWindow:
    """Sums over a few consecutive steps under one plan.

    Args:
        steps: number of steps.
        seconds: their time, from the moment one asks for its batch to the moment the next does.
        input_wait_seconds: part of it in which the device waited for a batch.
        idle_cpus: CPUs of the host that this process may use and nobody used, on average.
        loader_cpu_seconds: CPU time of the pipeline's own threads; None if not known.
        batch_bytes: size of a batch, 0 if not known.
        waiting_steps: steps that waited for 5 % of their time or more; None if not known.
        loader_queue_seconds: time in which the pipeline's own threads could run and waited for a
            CPU; None if not known.

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
        """Part of the time in which the device waited for data."""
        return min(self.input_wait_seconds / self.seconds, 1.0)

    @property
    def waits_unevenly(self) -> bool:
        """Whether a part of the steps found a batch waiting: supply is enough between bursts."""
        if self.waiting_steps is None:
            return False
        return self.steps - self.waiting_steps >= max(self.steps / 4, 2)

    @property
    def device_seconds(self) -> float:
        """Time of a step with its batch at hand, T."""
        return max(self.seconds - self.input_wait_seconds, 0.0) / self.steps


@dataclasses.dataclass(frozen=True)
class WindowSize:
    """Which steps the next window covers.

    Args:
        skip_steps: steps to let go by: their batches were ready before the plan was in effect.
        min_steps: steps that a window has at least.
        min_seconds: time that a window has at least.
    """

    skip_steps: int
    min_steps: int
    min_seconds: float


class StepSums:
    """Gathers steps until a window is full; called in every step, so it only adds.

    Args:
        size: which steps the first window covers.
    """

    def __init__(self, size: WindowSize) -> None:
        self.begin(size)

    def begin(self, size: WindowSize) -> None:
        """Starts a new window."""
        self._skip = size.skip_steps
        self._min_steps, self._min_seconds = size.min_steps, size.min_seconds
        self.steps = self.waiting_steps = 0
        self.seconds = self.input_wait_seconds = 0.0
        self.is_skipping = size.skip_steps > 0

    def pause(self, steps: int) -> None:
        """Lets steps go by, for instance the first ones of an epoch, and then goes on.

        Args:
            steps: how many.
        """
        self._skip = max(self._skip, steps)
        self.is_skipping = self._skip > 0

    def add(self, seconds: float, input_wait_seconds: float, steps: int = 1) -> bool:
        """Takes one step, or several that ran at once; returns whether the window is full.

        Args:
            seconds: time of the steps.
            input_wait_seconds: part of it in which they waited for their batches.
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
