"""What is known of recent steps, beside their times: speeds, bests, samples of the hardware."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from keras_het.planning.diagnosis.recording import Floats, Recording
from keras_het.planning.diagnosis.steps import BoolArray, Windows, means, medians
from keras_het.planning.diagnosis.what_if import (
    against_best,
    against_own_best,
    best_block,
    blocks,
    device_lines,
)

# A device is slow from this ratio on, and further by so many standard errors.
_SLOW = 1.15
_DEVIATIONS = 3.0
# Shares follow measured speeds if a step computes at most this many times as long as with the best
# ones, and differ from this ratio on.
_DEAD_BAND = 1.05
_OF_MEDIAN_DEVIATION = 1.4826
# Bits of NVML's clock event reasons that mean a fault; power cap alone is common under load.
_POWER_CAP = 0x4
_HEAT_OR_POWER = 0x8 | 0x20 | 0x40 | 0x80
_REASONS = {
    0x4: "its power limit",
    0x8: "a hardware slow-down",
    0x20: "heat",
    0x40: "heat",
    0x80: "the power brake",
}
# Fraction of the samples that must have a reason.
_OFTEN = 0.5
_LOW_CLOCK = 0.7
_FULL_CLOCK = 0.9
_BUSY_DEVICE = 0.5
_MORE_USED = 0.15
_MORE_MEMORY = 0.05
# Fraction of the time in which a quota stops a worker.
_STOPPED = 0.1
_SATURATED = 0.95
_LOST_BUDGET = 0.2
# CPUs in use by others, as a fraction of those that the worker may use, and the host's load.
_OTHERS = 0.3
_BUSY_HOST = 0.8
# Beside four other programs for each CPU, what computes all the time uses this much of one.
_WORKS = 0.2
# Another host is in the same state from this fraction of the reading on: readings are noisy.
_ALIKE = 0.8
# Beyond this a reading is a mistake.
_LARGEST = 1e18
_MOST_SAMPLES = 200


class Situation:
    """Everything that a diagnosis asks about, computed once."""

    def __init__(self, recording: Recording, windows: Windows) -> None:
        self.recording = recording
        self.windows = windows
        self.recent = windows.recent
        self.step_seconds = self.recent.mean(self.recent.seconds)
        self.lines = device_lines(recording, self.recent)
        self.shares = self.recent.shares.mean(axis=0)
        self.best = against_best(self.lines, self.recent)
        self.own_best = against_own_best(self.lines, windows)
        self.readings = Readings(recording, int(self.recent.numbers[0]))
        self.hosts = _host_states(recording, self.readings)
        self.devices_of: dict[int, list[int]] = {worker: [] for worker in self.hosts}
        for index, device in enumerate(recording.devices):
            self.devices_of[device.worker].append(index)

    def changed(self, kind: str) -> bool:
        return any(change.kind == kind for change in self.recording.changes)

    @functools.cached_property
    def limits(self) -> Floats:
        """Ratio from which on a device is slow, float64 of shape [N]."""
        times = self.lines.relative(self.recent.compute, self.recent.shares)
        deviation = _OF_MEDIAN_DEVIATION * medians(np.abs(times - medians(times)))
        error = np.nan_to_num(deviation) / np.sqrt(max(len(times), 1))
        return _SLOW + _DEVIATIONS * error

    @functools.cached_property
    def common(self) -> float:
        """The best score against themselves of all devices: what all have lost is no device's."""
        if len(self.own_best) < 2 or np.isnan(self.own_best).all():
            return 1.0
        return float(np.nanmax(self.own_best))

    @functools.cached_property
    def least_other(self) -> float:
        """Other time in seconds that a replica must spend, as far as is known."""
        earlier = best_block(self.windows.earlier.other)
        return float(np.nanmin([*earlier, self.recent.least_other]))

    def lack_of_cpus(self, worker: int, seconds: float) -> HostState | None:
        """Return what keeps CPUs from a worker, if it may need some for so long in each step."""
        # What waits for a disk, a network or a sleep gets no shorter when other programs end.
        host = self.hosts[worker]
        used = self.readings.of_worker("process.cpu.usage", worker) * self.step_seconds
        return None if host and not host.stopped and used < _WORKS * seconds else host

    @functools.cached_property
    def least_transfer(self) -> float:
        """Transfer in seconds in the best earlier steps; infinite if unknown."""
        best = best_block(self.windows.earlier.transfer[:, None])[0]
        return float(best) if np.isfinite(best) else np.inf

    @functools.cached_property
    def usual_seconds(self) -> float:
        """Step time in seconds, with medians in place of single times: without noise."""
        return usual_seconds(self.recent.own[None], self.recent.transfer[None])

    @functools.cached_property
    def least_seconds(self) -> float:
        """Usual step time of the best earlier steps with as many samples; infinite if unknown."""
        earlier = self.windows.earlier
        total = earlier.shares.sum(axis=1)
        now = float(medians(self.recent.shares.sum(axis=1)))
        same = np.abs(total - now) <= 0.02 * now
        return usual_seconds(blocks(earlier.own[same]), blocks(earlier.transfer[same]))

    @functools.cached_property
    def share_seconds(self) -> Floats:
        """Compute time of each device's present share in seconds, float64 of shape [N]."""
        seconds = np.nan_to_num(self.lines.seconds(self.shares))
        return np.where(self.shares > 0, seconds, 0.0)

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
        shares = lines.balanced(self.shares)
        seconds = np.where(shares > 0, np.nan_to_num(lines.seconds(shares)), 0.0)
        return float(seconds.max(initial=0.0))


def usual_seconds(own: Floats, transfer: Floats) -> float:
    """Return the shortest usual step of blocks: of medians over their rows."""
    seconds = medians(own, axis=1).max(axis=1, initial=0.0) + medians(transfer, axis=1)
    return float(seconds.min(initial=np.inf))


@dataclasses.dataclass(frozen=True)
class Throttle:
    """Why a device is clocked down."""

    why: str
    fraction: float
    reason: str
    certain: bool


@dataclasses.dataclass(frozen=True)
class HostState:
    """What is wrong with the host of a worker, and which devices are on one as bad."""

    kind: str
    why: str
    alike: BoolArray
    quota: bool = False
    stopped: float = 0.0


class Readings:
    """Means of the hardware's samples in recent steps, and before."""

    def __init__(self, recording: Recording, first: int) -> None:
        self._recording = recording
        self._workers = np.array([device.worker for device in recording.devices], np.int64)
        recent = np.asarray(recording.hardware_steps) >= first
        if not recent.any() and len(recent):
            recent[-1] = True  # sampled rarely: the latest sample stands
        self._recent = recent
        self.mean = functools.cache(self._mean)

    def _mean(self, name: str, recent: bool = True) -> Floats:
        """Return the mean of a quantity in recent steps or before, [N]; NaN where unknown."""
        values = self._recording.hardware.get(name)
        if values is None:
            return np.full(len(self._workers), np.nan)
        rows = np.flatnonzero(self._recent == recent)
        chosen = np.asarray(values, np.float64)[rows[:: max(len(rows) // _MOST_SAMPLES, 1)]]
        return means(np.where(np.abs(chosen) < _LARGEST, chosen, np.nan))

    def of_worker(self, name: str, worker: int, recent: bool = True) -> float:
        """Return the mean of a quantity over a worker's devices; NaN where unknown."""
        values = self.mean(name, recent)[self._workers == worker]
        return float(means(values[:, None])[0])

    def knows_clock(self, device: int) -> bool:
        clock = self.mean("keras_het.gpu.clock") + self.mean("keras_het.gpu.clock_limit")
        reasons = self.mean("keras_het.gpu.throttle_reasons")
        return bool(np.isfinite(clock[device]) or np.isfinite(reasons[device]))

    def knows_host(self, worker: int) -> bool:
        return any(
            np.isfinite(self.of_worker(name, worker))
            for name in ("keras_het.cpu.throttled", "process.cpu.usage", "system.cpu.utilization")
        )

    def throttled(self, device: int, degraded: bool) -> Throttle | None:
        """Return why a device is clocked down; None if it is not."""
        clock = float(self.mean("keras_het.gpu.clock")[device])
        limit = float(self.mean("keras_het.gpu.clock_limit")[device])
        before = float(self.mean("keras_het.gpu.clock", recent=False)[device])
        fraction = clock / limit if 0 < clock <= limit else np.nan
        reason = self._reason(device, _HEAT_OR_POWER)
        certain = bool(reason)
        if not reason and degraded and not fraction > _FULL_CLOCK:
            reason = self._reason(device, _POWER_CAP)
        # A device without work lowers its clock itself.
        works = not self.mean("hw.gpu.utilization")[device] < _BUSY_DEVICE
        fell = degraded and clock < _FULL_CLOCK * before
        if not reason and not (works and (fraction < _LOW_CLOCK or fell)):
            return None
        shown = "is clocked down"
        if fraction > 0:
            shown = f"runs at {clock / 1e6:.0f} of {limit / 1e6:.0f} MHz"
        because = f" because of {reason}" if reason else ""
        return Throttle(shown + because, fraction, reason, certain)

    def _reason(self, device: int, bits: int) -> str:
        values = self._recording.hardware.get("keras_het.gpu.throttle_reasons")
        if values is None:
            return ""
        column = np.asarray(values, np.float64)[self._recent, device]
        column = column[np.isfinite(column) & (column >= 0) & (column < 2**53)].astype(np.int64)
        for bit, text in _REASONS.items():
            if bit & bits and len(column) and ((column & bit) > 0).mean() >= _OFTEN:
                return text
        return ""

    def other_program_on(self, device: int) -> str:
        """Return what shows another program on a device; empty if nothing does."""
        (used, before), (memory, memory_before) = (
            (float(self.mean(name)[device]), float(self.mean(name, recent=False)[device]))
            for name in ("hw.gpu.utilization", "hw.gpu.memory.usage")
        )
        more = (memory - memory_before) / self.mean("hw.gpu.memory.limit")[device]
        if more > _MORE_MEMORY:
            return f"{more * 100:.0f} % more of its memory are in use than before"
        if used - before > _MORE_USED:
            return f"its utilization rose from {before * 100:.0f} to {used * 100:.0f} %"
        return ""


def _host_states(recording: Recording, readings: Readings) -> dict[int, HostState | None]:
    """Return what keeps CPUs from each worker; None if nothing is known to do so."""
    workers = np.array([device.worker for device in recording.devices], np.int64)
    everyone = np.unique(workers)
    hosts: list[set[str]] = [set() for _ in everyone]
    kinds: list[set[str]] = [set() for _ in everyone]
    for place, device in zip(np.searchsorted(everyone, workers), recording.devices, strict=True):
        hosts[place].add(device.host)
        kinds[place].add(device.kind)
    beside = [
        [other for other, names in enumerate(hosts) if other != place and names & hosts[place]]
        for place in range(len(everyone))
    ]

    def of(name: str, recent: bool = True) -> Floats:
        return np.array([readings.of_worker(name, each, recent) for each in everyone], np.float64)

    budget, before = of("keras_het.cpu.budget"), of("keras_het.cpu.budget", recent=False)
    usage, load = of("process.cpu.usage"), of("system.cpu.utilization")
    of_others = [sum(np.nan_to_num(usage[others]).tolist()) for others in beside]
    stopped = of("keras_het.cpu.throttled")
    lost, used = 1.0 - budget / before, usage / budget
    # The host has as many CPUs as the budget at least.
    foreign = load - (usage + np.array(of_others)) / budget

    def state(i: int) -> HostState | None:
        def alike(values: Floats) -> BoolArray:
            return np.isin(workers, everyone[values >= _ALIKE * values[i]])

        cpus = f"{budget[i]:.3g} CPU" + ("" if f"{budget[i]:.3g}" == "1" else "s")
        if stopped[i] >= _STOPPED:
            why = f"a CPU quota stops it for {stopped[i] * 100:.0f} % of the time"
            return HostState("host", why, alike(stopped), True, min(float(stopped[i]), 0.99))
        if lost[i] > _LOST_BUDGET:
            why = f"it has {cpus} instead of {before[i]:.3g}"
            return HostState("host", why, alike(lost), quota=True)
        if load[i] >= _BUSY_HOST and foreign[i] >= _OTHERS:
            why = (
                f"its host is {load[i] * 100:.0f} % busy, and other programs use at least "
                f"{foreign[i] * budget[i]:.2g} of its {cpus}"
            )
            same_host = np.isin(workers, everyone[[i, *beside[i]]])
            return HostState("other_program", why, alike(foreign) | same_host)
        if "CPU" not in kinds[i] and used[i] >= _SATURATED:
            return HostState("host", f"it keeps {usage[i]:.3g} of its {cpus} busy", alike(used))
        return None

    return {worker: state(i) for i, worker in enumerate(everyone.tolist())}
