"""Controller that grows only while the device waits, and confirms each move by measurement."""

from __future__ import annotations

import dataclasses
import math

from keras_het.planning.loader.controller import LoaderPlan, LoaderWindow, WindowSize
from keras_het.planning.loader.throughput_model import JobModel, ThroughputModel

_FIRST_PAUSE_SECONDS = 2.0
_LONGEST_PAUSE_SECONDS = 120.0
# Kinds of move that have a cost and must therefore make steps faster.
_UP = ("more loaders", "more prefetch")


@dataclasses.dataclass(frozen=True)
class Trial:
    """A plan in effect that has yet to prove itself."""

    kind: str
    before: LoaderPlan
    window: LoaderWindow
    predicted_gain: float = 0.0

    def pays(self, after: LoaderWindow) -> bool:
        """Whether to keep the move: up must make steps faster, down must not make them slower."""
        gain = after.steps_per_second / self.window.steps_per_second - 1.0
        if self.kind in _UP:
            needed = min(0.08, max(0.02, self.predicted_gain / 2))
            # Loaders and buffers shorten waits; any other gain is noise, of which a long training
            # has enough to grow without end.
            shorter = self.window.wait_per_step - after.wait_per_step
            return gain >= needed and shorter >= 0.75 * needed / self.window.steps_per_second
        if self.window.idle_fraction > 0.1:
            return gain >= -0.02
        return after.idle_fraction <= max(self.window.idle_fraction + 0.015, 0.03)


class Pauses:
    """Time for which each kind of failed move stays blocked: twice as long each time."""

    def __init__(self) -> None:
        self._pauses: dict[str, tuple[float, float]] = {}  # the end, and the next one's length

    def start(self, kind: str, now: float) -> None:
        _, length = self._pauses.get(kind, (0.0, _FIRST_PAUSE_SECONDS))
        self._pauses[kind] = now + length, min(2 * length, _LONGEST_PAUSE_SECONDS)

    def allow(self, kind: str, now: float) -> bool:
        return kind not in self._pauses or now >= self._pauses[kind][0]

    def end(self, kind: str | None = None) -> None:
        """Unblock a kind of move, by default all: earlier findings no longer hold."""
        if kind is None:
            self._pauses.clear()
        else:
            self._pauses.pop(kind, None)


WAITS = 0.03
"""Idle fraction above which the device counts as waiting."""
WORTH_A_TRIAL_SECONDS = 0.2
"""Time lost to short waits that justifies a move: about the cost of a failed one."""
_MUCH = 0.25
"""Idle fraction above which each window costs more than a trial."""
CALM_SECONDS = 4.0
"""Time without waiting after which smaller settings are tried."""
CHANGED = 0.25
"""Relative error of the predicted throughput above which the job counts as changed."""


class TunerController:
    """Search for the fewest loaders and shortest buffer with which the device does not wait.

    - Up, while the device waits and the host has the resources: computing loaders need idle
      CPUs; loaders that wait for I/O may outnumber the cores and need no idle CPU, but their
      computation must fit this job's part of the CPUs. A throughput model fitted to the windows
      says how far to go; a step is at most x4 while the model is less certain (x16 for loaders
      that mostly wait, which cost little), x2 while the device waits less than half of the time.
    - A wait of a few percent offers little gain, and a failed move costs two handovers and a
      slow second: it is tried once the device has lost as much (the ski-rental rule: at most
      twice the loss of perfect foresight).
    - Each move is confirmed by the next window and reverted if it does not pay. A kind of move
      that failed stays blocked for 2, 4, 8, ... 120 s, or until the job changes, which shows in
      the model's error.
    - Down, if the device has not waited for a while, or if busy CPUs have more loaders than they
      can use.
    - `skip_steps` of the windows excludes batches buffered under the previous plan.

    Args:
        plan: the first plan.
        cpus: number of CPUs that this process may use.
        max_loaders: largest number of loaders.
        max_prefetch: largest number of finished batches that wait.
        max_memory: largest total size in bytes of batches in preparation or waiting; None for no
            bound.

    Raises:
        ValueError: if there is no CPU, or `plan` exceeds a bound.
    """

    name = "tuner"

    def __init__(
        self,
        plan: LoaderPlan,
        cpus: float,
        *,
        max_loaders: int = 128,
        max_prefetch: int = 64,
        max_memory: int | None = None,
    ) -> None:
        if not cpus > 0 or plan.loaders > max_loaders or plan.prefetch > max_prefetch:
            raise ValueError(
                "There must be CPUs, and the first plan must be within the bounds. Received: "
                f"cpus={cpus}, {plan}, max_loaders={max_loaders}, max_prefetch={max_prefetch}."
            )
        self.plan = plan
        self._least_prefetch = plan.prefetch
        self._cpus = cpus
        self._host_cpus = cpus
        self._max_loaders, self._max_prefetch = max_loaders, max_prefetch
        self._max_memory = max_memory
        self._model = ThroughputModel()
        self._pauses = Pauses()
        self._reading: int | None = None
        self._trial: Trial | None = None
        self._replaced: LoaderPlan | None = None
        self._now = 0.0
        self._calm = 0.0
        self._lost = 0.0
        self._skip = plan.prefetch + 2
        self._expected: float | None = None
        self._hurry = True

    @property
    def job(self) -> JobModel | None:
        """The model of the job; None before the device has waited."""
        return self._model.job if self._model.is_fitted else None

    @property
    def confirmed_plan(self) -> LoaderPlan:
        """The plan in effect, or the previous one while it has yet to prove itself."""
        return self.plan if self._trial is None else self._trial.before

    @property
    def next_window(self) -> WindowSize:
        """A short window while much can be gained, a longer one to tell small waits from noise."""
        effect = self._trial.predicted_gain if self._trial else (1.0 if self._hurry else 0.0)
        if effect > 0.5:
            return WindowSize(self._skip, 4, 0.1)
        sure = self._trial is None or effect > 0.1 or self._trial.kind not in _UP
        return WindowSize(self._skip, 16, 0.5 if sure else 1.0)

    def set_cpus(self, cpus: float) -> None:
        """Bound the CPUs of the loaders: this job's part of a shared host."""
        self._cpus = min(cpus, self._host_cpus)

    def set_reading_loaders(self, loaders: int | None) -> None:
        """Bound the loaders: this job's part of the host's user-defined reading threads.

        Args:
            loaders: largest number of loaders, None for no such bound.
        """
        if (loaders or math.inf) > (self._reading or math.inf):
            self._pauses.end("more loaders")  # they failed under a tighter bound
        self._reading = loaders

    def refused(self, plan: LoaderPlan) -> None:
        """Revert, because a plan could not be put into effect."""
        before, self._replaced = self._replaced, None
        if before is None or plan != self.plan:
            return
        if self._trial is not None:
            self._pauses.start(self._trial.kind, self._now)
            self._trial = None
        self._adopt(before)
        self._replaced = None
        self._skip = 0

    def observe(self, window: LoaderWindow) -> LoaderPlan | None:
        """Take a window under the plan in effect; return a new plan if there should be one."""
        self._now += window.seconds
        self._skip = 0
        moved = self._keep_part()
        if moved is not None:
            return moved
        if self._trial is None and self._has_changed(window):
            # This window mixes the job before and after the change: the next one decides.
            self._hurry = True
            return None
        cpu = window.loader_cpu_seconds
        self._model.observe(
            self.plan.loaders,
            window.steps_per_second,
            window.idle_fraction,
            window.device_seconds,
            None if cpu is None else cpu / window.steps,
        )
        plan = self._confirm(window) if self._trial else None
        if plan is None:
            plan = self._next_move(window)
        self._hurry = window.idle_fraction > 0.5
        return plan

    def _keep_part(self) -> LoaderPlan | None:
        """Leave reading threads to other jobs."""
        part = self._reading
        if part is None or self.plan.loaders <= part:
            return None
        self._trial = self._expected = None
        # Read times depended on all threads of the host.
        self._model.forget()
        reason = f"{part} reading threads are this job's part of the host"
        return self._adopt(LoaderPlan(part, self.plan.prefetch, reason))

    def _has_changed(self, window: LoaderWindow) -> bool:
        expected, found = self._expected, window.steps_per_second
        if expected is not None and abs(found - expected) > CHANGED * expected:
            self._model.forget()
            self._pauses.end()
            self._expected = None
            return True
        self._expected = found if expected is None else 0.7 * expected + 0.3 * found
        return False

    def _confirm(self, window: LoaderWindow) -> LoaderPlan | None:
        trial, self._trial = self._trial, None
        if trial is None or trial.pays(window):
            self._expected = window.steps_per_second
            return None
        self._pauses.start(trial.kind, self._now)
        self._expected = None
        return self._adopt(dataclasses.replace(trial.before, reason=f"{trial.kind} did not pay"))

    def _next_move(self, window: LoaderWindow) -> LoaderPlan | None:
        over = self._over_bound(window)
        if over is not None:
            return self._adopt(over)
        if window.idle_fraction > WAITS:
            self._calm = 0.0
            self._lost += window.input_wait_seconds
            if window.idle_fraction < _MUCH and self._lost < WORTH_A_TRIAL_SECONDS:
                return None
            grow = (self._more_loaders, self._more_prefetch)
            moves = (self._relieve, self._trim, *(grow[::-1] if window.waits_unevenly else grow))
            return next((plan for move in moves if (plan := move(window)) is not None), None)
        self._calm += window.seconds
        return self._less(window) if self._calm >= CALM_SECONDS else None

    # --- up

    def _more_loaders(self, window: LoaderWindow) -> LoaderPlan | None:
        if not self._model.is_fitted:
            return None
        job, now = self._model.job, self.plan.loaders
        mostly_waits = window.loader_cpu_seconds is not None and job.cpus_per_loader < 0.5
        largest_step = 2 if window.idle_fraction < 0.5 else 16 if mostly_waits else 4
        in_memory = max(self._batches_in_memory(window) - self.plan.prefetch, 1)
        most = int(min(now * largest_step, self._max_loaders, in_memory))
        most = min(most, self._reading or most)
        if window.loader_cpu_seconds is not None or window.idle_cpus < 0.25:
            most = min(most, self._loaders_for_cpus(window, job))
        target = job.enough_loaders(max(most, 1))
        if target <= now:
            return None
        # The gain is at most the entire wait.
        most_gain = window.idle_fraction / max(1.0 - window.idle_fraction, 1e-9)
        gain = min(job.throughput(target) / job.throughput(now) - 1.0, most_gain)
        if gain < 0.02:
            return None
        reason = f"device waits {window.idle_fraction:.0%}, {gain:+.0%} predicted"
        plan = LoaderPlan(target, self.plan.prefetch, reason)
        return self._try("more loaders", plan, window, gain)

    def _loaders_for_cpus(self, window: LoaderWindow, job: JobModel) -> int:
        """Return the number of loaders for which there are CPUs: those in use and idle ones.

        On a busy host, loaders that mostly wait may use this job's part of the CPUs.
        """
        if window.loader_cpu_seconds is None:
            # Unknown: no idle CPU, no growth.
            return self.plan.loaders
        used = window.loader_cpu_seconds / window.seconds
        part = max(self._cpus - used, 0.0)
        free = min(window.idle_cpus, part)
        if free < 0.1 * self._host_cpus:
            if not _waits_for_io(self.plan.loaders, window):
                return self.plan.loaders
            # More of them wait in parallel; the next window shows if they lack the CPUs after all.
            free = part
        return max(int((used + free) / max(job.cpus_per_loader, 1e-3)), 1)

    def _batches_in_memory(self, window: LoaderWindow) -> float:
        """Return how many batches may be in preparation or wait; infinite without a bound."""
        if self._max_memory is None or not window.batch_bytes:
            return math.inf
        return self._max_memory // window.batch_bytes

    def _more_prefetch(self, window: LoaderWindow) -> LoaderPlan | None:
        """Lengthen the buffer, which helps if supply is sufficient on average but uneven."""
        if window.waiting_steps is not None and not window.waits_unevenly:
            return None
        in_memory = self._batches_in_memory(window) - self.plan.loaders
        target = int(min(4 * self.plan.prefetch, self._max_prefetch, in_memory))
        if target <= self.plan.prefetch:
            return None
        reason = f"device waits {window.idle_fraction:.0%} in a part of the steps"
        plan = LoaderPlan(self.plan.loaders, target, reason)
        return self._try("more prefetch", plan, window, window.idle_fraction / 2)

    # --- down

    def _relieve(self, window: LoaderWindow) -> LoaderPlan | None:
        """Remove loaders if all CPUs are busy with more of them than they can use."""
        fewest = max(math.ceil(self._cpus), 1)
        busy = window.idle_cpus < 0.1 * self._host_cpus
        uses = 1.0
        if window.loader_cpu_seconds is not None:
            uses = window.loader_cpu_seconds / window.seconds / self.plan.loaders
        computes = uses * self.plan.loaders > 0.5 * self._cpus
        if not (busy and computes and self.plan.loaders > fewest):
            return None
        if _waits_for_io(self.plan.loaders, window):
            return None  # as many as needed to use the CPUs
        reason = f"CPUs are busy, more than {fewest} loaders only hinder each other"
        return self._try("fewer loaders", LoaderPlan(fewest, self.plan.prefetch, reason), window)

    def _trim(self, window: LoaderWindow) -> LoaderPlan | None:
        """Remove loaders if, as the model now knows, a serial part bounds them."""
        if not self._model.has_line:
            return None
        enough = self._model.job.enough_loaders(self.plan.loaders)
        # The line ignores CPUs, which fewer loaders would leave idle.
        enough = max(enough, math.ceil(self._cpus))
        if enough > 0.6 * self.plan.loaders:
            return None
        plan = LoaderPlan(enough, self.plan.prefetch, "more loaders do not make it faster")
        return self._try("fewer loaders", plan, window)

    def _less(self, window: LoaderWindow) -> LoaderPlan | None:
        """Remove loaders, then shorten the buffer, while the device does not wait."""
        loaders, prefetch = self.plan.loaders, self.plan.prefetch
        fewer, shorter = max(loaders // 2, 1), max(prefetch // 2, self._least_prefetch)
        if self._model.is_fitted:
            fewer = max(fewer, math.ceil(0.75 * self._model.job.enough_loaders(loaders)))
        plan = None
        if fewer < loaders:
            to = LoaderPlan(fewer, prefetch, "device does not wait")
            plan = self._try("fewer loaders", to, window)
        if plan is None and shorter < prefetch:
            to = LoaderPlan(loaders, shorter, "device does not wait")
            plan = self._try("less prefetch", to, window)
        return plan

    def _over_bound(self, window: LoaderWindow) -> LoaderPlan | None:
        """Return a plan that respects `max_memory`, if the current one does not."""
        batches = max(self._batches_in_memory(window), 2)
        if self.plan.loaders + self.plan.prefetch <= batches:
            return None
        prefetch = max(min(self.plan.prefetch, int(batches) // 2), 1)
        loaders = max(min(self.plan.loaders, int(batches) - prefetch), 1)
        self._least_prefetch = min(self._least_prefetch, prefetch)
        plan = LoaderPlan(loaders, prefetch, f"at most {self._max_memory} bytes of batches")
        return None if plan == self.plan else plan

    # --- common

    def _try(
        self, kind: str, plan: LoaderPlan, window: LoaderWindow, gain: float = 0.0
    ) -> LoaderPlan | None:
        """Begin a trial, unless such a move has failed a short time ago."""
        if not self._pauses.allow(kind, self._now):
            return None
        self._trial = Trial(kind, self.plan, window, gain)
        return self._adopt(plan)

    def _adopt(self, plan: LoaderPlan) -> LoaderPlan:
        """Put a plan into effect; batches that were ready before are not its work."""
        # A loader holds up to two samples or batches.
        self._skip = self.plan.prefetch + 2 * self.plan.loaders + 1
        self._calm = self._lost = 0.0
        self._replaced, self.plan = self.plan, plan
        return plan


def _waits_for_io(loaders: int, window: LoaderWindow) -> bool:
    """Whether loaders mostly wait for I/O rather than for a CPU; False if nothing shows it."""
    if window.loader_cpu_seconds is None or window.loader_queue_seconds is None:
        return False
    runs = window.loader_cpu_seconds + window.loader_queue_seconds
    return runs < 0.5 * loaders * window.seconds
