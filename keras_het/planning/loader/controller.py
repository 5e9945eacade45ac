"""What a loader controller measures and decides, and the controller that changes nothing."""

from __future__ import annotations

import dataclasses
from typing import Protocol, runtime_checkable

from keras_het.planning.argument_checks import check_number


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
        check_number("steps", self.steps, least=1)
        check_number("seconds", self.seconds, above=0)

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


@dataclasses.dataclass(frozen=True)
class LoaderPlan:
    """Degree of read-ahead and parallelism of a worker's input pipeline.

    Args:
        loaders: number of samples prepared at the same time, n.
        prefetch: number of finished batches that may wait for the device.
        reason: the reason, in a few words.

    Raises:
        ValueError: if a number is less than 1.
    """

    loaders: int
    prefetch: int
    reason: str = dataclasses.field(default="", compare=False)

    def __post_init__(self) -> None:
        check_number("loaders", self.loaders, least=1)
        check_number("prefetch", self.prefetch, least=1)

    def __str__(self) -> str:
        text = f"{self.loaders} loaders, prefetch {self.prefetch}"
        return f"{text} ({self.reason})" if self.reason else text


@runtime_checkable
class LoaderController(Protocol):
    """Decisions about loaders from windows of steps; the same windows lead to the same plans."""

    @property
    def name(self) -> str:
        """Name of the controller, as users pass it."""

    @property
    def plan(self) -> LoaderPlan:
        """The plan in effect."""

    @property
    def next_window(self) -> WindowSize:
        """Return which steps the next `observe` should cover."""

    def observe(self, window: LoaderWindow) -> LoaderPlan | None:
        """Take a window under the plan in effect; return a new plan if there should be one."""

    def refused(self, plan: LoaderPlan) -> None:
        """Withdraw the last plan of `observe`, which could not be put into effect."""

    def set_cpus(self, cpus: float) -> None:
        """Bound the CPUs that the loaders may use."""

    def set_reading_loaders(self, loaders: int | None) -> None:
        """Bound the loaders while they mostly wait for I/O; None for no bound."""


class FixedController:
    """Controller that keeps one plan.

    Args:
        plan: the plan.
    """

    name = "fixed"

    def __init__(self, plan: LoaderPlan) -> None:
        self.plan = plan

    @property
    def next_window(self) -> WindowSize:
        """Return a window of a second."""
        return WindowSize(skip_steps=0, min_steps=1, min_seconds=1.0)

    def observe(self, window: LoaderWindow) -> LoaderPlan | None:
        """Take a window; the plan stays."""
        del window
        return None

    def refused(self, plan: LoaderPlan) -> None:
        """Do nothing; never called, because this controller proposes nothing."""

    def set_cpus(self, cpus: float) -> None:
        """Do nothing: the plan stays."""

    def set_reading_loaders(self, loaders: int | None) -> None:
        """Do nothing: the plan stays."""


_WAITS = 0.1
"""Idle fraction above which all threads of a pipeline are busy or waiting."""
_HIGHEST_IDLE_FRACTION = 0.99
_AVERAGED_SECONDS = 4.0
"""Averaging time: each job's share of a disk fluctuates within seconds."""
_CHANGED = 1.25
"""Ratio above which a need counts as changed: each division costs handovers."""
_SHORTEST_SECONDS = 15.0
_SHORTEST_IN_WINDOWS = 4.0
_OTHER_STEPS_OF_A_MOVE = 32
"""Steps of the buffer, and of the window after it."""


@dataclasses.dataclass(frozen=True)
class ReadingNeed:
    """Announcement to the host's other jobs by a job whose loaders mostly wait for I/O.

    Args:
        threads: number of loaders with which its device would not wait, r; 1 or more.
        until: time after which it no longer counts as reading unless it announces again, in seconds
            of a clock that all jobs share.

    Raises:
        ValueError: if it needs no thread.
    """

    threads: float
    until: float

    def __post_init__(self) -> None:
        check_number("threads", self.threads, least=1)


class ReadingJob:
    """Whether a job's loaders mostly wait for I/O, from window to window, and its need.

    While the device waits, every loader is busy: time in which it neither computes nor waits for a
    CPU is I/O wait. While the device does not wait, loaders rest, and the earlier finding holds.

    While it waits, the device works a fraction 1 - idle = n / r of the time, so r = n / (1 - idle).
    """

    def __init__(self) -> None:
        self._reads = False
        self._work = 0.0
        self._announced = 0.0

    def observe(self, loaders: int, window: LoaderWindow, now: float) -> ReadingNeed | None:
        """Take a window.

        Args:
            loaders: loaders in effect, n.
            window: the measurements.
            now: time, in seconds of a clock that all jobs share.

        Returns:
            The job's need, unchanged unless it differs by a quarter; None if its loaders do not
            mostly wait for I/O.
        """
        did_read, self._reads = self._reads, self._still_reads(loaders, window)
        if not self._reads:
            return None
        work = (1.0 - min(window.idle_fraction, _HIGHEST_IDLE_FRACTION)) / loaders
        weight = min(window.seconds / _AVERAGED_SECONDS, 1.0) if did_read else 1.0
        self._work += weight * (work - self._work)
        need = 1.0 / self._work
        if not did_read or not 1.0 / _CHANGED < need / self._announced < _CHANGED:
            self._announced = need
        return ReadingNeed(self._announced, now + _seconds_until_the_next(loaders, window))

    def _still_reads(self, loaders: int, window: LoaderWindow) -> bool:
        if window.loader_cpu_seconds is None:
            return False  # nothing distinguishes reading from computing
        if window.idle_fraction <= _WAITS:
            return self._reads
        runs = window.loader_cpu_seconds + (window.loader_queue_seconds or 0.0)
        # Hysteresis: a borderline job keeps its classification.
        limit = 0.6 if self._reads else 0.5
        return runs < limit * loaders * window.seconds


def _seconds_until_the_next(loaders: int, window: LoaderWindow) -> float:
    """Return the time within which a reading job has another window: it may validate or save."""
    # A job in the middle of a move reads too, but has no window until its loaders' batches are
    # used.
    move = (2 * loaders + _OTHER_STEPS_OF_A_MOVE) * window.seconds / window.steps
    return max(_SHORTEST_SECONDS, _SHORTEST_IN_WINDOWS * window.seconds, 1.5 * move)
