"""What is known of recent steps, beside their times: speeds and bests, each computed once."""

from __future__ import annotations

import functools

import numpy as np

from keras_het.planning.diagnosis.device_lines import device_lines
from keras_het.planning.diagnosis.readings import Fault, Readings, host_faults
from keras_het.planning.diagnosis.recording import Floats, Recording
from keras_het.planning.diagnosis.statistics import best_block, means, medians
from keras_het.planning.diagnosis.windows import choose_windows

# A device is slow from this ratio on, and further by so many standard errors.
_SLOW = 1.15
_DEVIATIONS = 3.0
_OF_MEDIAN_DEVIATION = 1.4826
# Shares follow measured speeds if a step computes at most this many times as long as with the best
# ones, and differ from this ratio on.
_DEAD_BAND = 1.05
# What keeps this much of a CPU busy, beside four other programs for each, computes all the time.
_WORKS = 0.2
# A thread that waits for CPUs explains a loss from this fraction of it on.
_WAITED = 0.5


class Situation:
    """Everything that is asked about the recent steps of a recording."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.windows = choose_windows(recording)
        self.recent = self.windows.recent
        self.step_seconds = self.recent.mean(self.recent.seconds)
        self.lines = device_lines(recording, self.recent)
        self.shares = means(self.recent.shares)
        self.mean_share_seconds = self.lines.seconds(float(means(self.recent.shares.ravel())))
        workers = [device.worker for device in recording.devices]
        self.devices_of = {
            worker: [index for index, other in enumerate(workers) if other == worker]
            for worker in sorted(set(workers))
        }

    def changed(self, kind: str) -> bool:
        return any(change.kind == kind for change in self.recording.changes)

    @functools.cached_property
    def readings(self) -> Readings:
        return Readings(self.recording, int(self.recent.numbers[0]))

    @functools.cached_property
    def hosts(self) -> dict[int, Fault | None]:
        """What keeps CPUs from each worker; None if nothing is known to do so."""
        return host_faults(self.recording, self.readings)

    @functools.cached_property
    def best(self) -> Floats:
        """How fast each device is, compared with the fastest; 1 at most, NaN where unknown."""
        seconds = self.mean_share_seconds
        if self.recording.pipeline is not None:  # its devices have different layers
            return np.full_like(seconds, np.nan)
        least = seconds[seconds > 0].min(initial=np.inf)
        return np.where(seconds > 0, least / seconds, np.nan)

    @functools.cached_property
    def own_best(self) -> Floats:
        """How fast each device is, compared with its best earlier steps; 1 at most, or NaN."""
        recent, earlier = (
            self.lines.relative(steps.compute, steps.shares)
            for steps in (self.recent, self.windows.earlier)
        )
        now = medians(recent)
        return np.where(now > 0, np.minimum(best_block(earlier) / now, 1.0), np.nan)

    @functools.cached_property
    def common(self) -> float:
        """The best score against themselves of all devices: what all have lost is no device's."""
        if len(self.own_best) < 2 or np.isnan(self.own_best).all():
            return 1.0
        return float(np.nanmax(self.own_best))

    @functools.cached_property
    def limits(self) -> Floats:
        """Ratio from which on a device is slow, float64 of shape [N]."""
        times = self.lines.relative(self.recent.compute, self.recent.shares)
        deviation = _OF_MEDIAN_DEVIATION * medians(np.abs(times - medians(times)))
        error = np.nan_to_num(deviation) / np.sqrt(max(len(times), 1))
        return _SLOW + _DEVIATIONS * error

    @functools.cached_property
    def ideal_compute(self) -> Floats:
        """Compute times of steps if no device took longer for its share than the fastest would."""
        if np.isnan(self.mean_share_seconds).all():
            return self.recent.compute
        fastest = int(np.nanargmin(self.mean_share_seconds))
        line = self.lines.fixed[fastest] + self.lines.slope[fastest] * self.recent.shares
        return np.minimum(self.recent.compute, line)

    @functools.cached_property
    def share_seconds(self) -> Floats:
        """Compute time of each device's present share in seconds, float64 of shape [N]."""
        return self.lines.known_seconds(self.shares)

    @functools.cached_property
    def balanced_seconds(self) -> float:
        """Compute time of a step with balanced shares in seconds; NaN if no speed is known."""
        return self.balanced_seconds_with(np.ones(len(self.lines.fixed)))

    @functools.cached_property
    def unbalanced(self) -> float:
        """How many times as long as with balanced shares steps compute with the present ones."""
        best = self.balanced_seconds
        return float(self.share_seconds.max(initial=0.0)) / best if best > 0 else 1.0

    @property
    def is_balanced(self) -> bool:
        """Whether the present shares follow the measured speeds, up to a dead-band."""
        return self.unbalanced <= _DEAD_BAND

    @property
    def follows(self) -> bool:
        """Whether somebody balances: shares differ, and follow the measured speeds."""
        differs = np.abs(self.shares - self.shares.mean()) > (_DEAD_BAND - 1) * self.shares.mean()
        return self.is_balanced and bool(differs.any())

    def balanced_seconds_with(self, factors: Floats) -> float:
        """Return a step's compute time with balanced shares, if devices changed their speed."""
        lines = self.lines.scaled(factors)
        return float(lines.known_seconds(lines.balanced(self.shares)).max(initial=0.0))

    def lack_of_cpus(self, worker: int, seconds: float, lost: float) -> Fault | None:
        """Return what keeps CPUs from a worker, if that can explain a loss.

        In each step the worker may need CPUs for up to `seconds`, and loses `lost` seconds.
        """
        # What waits for a disk, a network or a sleep gets no shorter when other programs end.
        host = self.hosts[worker]
        if host is None or not np.isnan(host.fraction):
            return host
        used = self.readings.of_worker("process.cpu.usage", worker) * self.step_seconds
        waited = self.readings.usual_wait_for_cpus(worker) * self.step_seconds
        # The kernel says how long threads waited; not of those that a quota stops.
        is_innocent = waited < _WAITED * lost and host.remedy != "quota"
        return None if is_innocent or used < _WORKS * seconds else host
