"""What samples of the hardware say of devices and hosts: what slows them."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from keras_het.planning.diagnosis.recording import Booleans, Floats, Recording
from keras_het.planning.diagnosis.statistics import means, medians

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
# Another host is in the same state from this fraction of the reading on: readings are noisy.
_ALIKE = 0.8
# Beyond this a reading is a mistake.
_LARGEST = 1e18
_MOST_SAMPLES = 200


@dataclasses.dataclass(frozen=True)
class Fault:
    """Something that makes steps longer, in words; what has become slow is `since`."""

    # It is of a device if it is not of its whole worker. The device would need only a fraction of
    # its compute time without it; NaN if that is unknown. `remedy` is the name of a closer one than
    # that of the kind. Of what keeps CPUs from a worker, `alike` are the devices on hosts as bad.

    kind: str
    why: str
    fraction: float = np.nan
    remedy: str = ""
    is_of_device: bool = True
    since: bool = False
    alike: Booleans | None = None

    def others_alike(self, devices: int | list[int]) -> Booleans:
        others = np.array(self.alike)
        others[devices] = False
        return others


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
        return means(self._samples(name, recent))

    def _samples(self, name: str, recent: bool = True) -> Floats:
        """Return a quantity in recent steps or before, [samples, N]; NaN where unknown."""
        values = self._recording.hardware.get(name)
        if values is None:
            return np.full((1, len(self._workers)), np.nan)
        rows = np.flatnonzero(self._recent == recent)
        chosen = np.asarray(values, np.float64)[rows[:: max(len(rows) // _MOST_SAMPLES, 1)]]
        return np.where(np.abs(chosen) < _LARGEST, chosen, np.nan)

    def usual_wait_for_cpus(self, worker: int) -> float:
        """Return the part of the time in which a thread waits for a CPU, NaN where unknown."""
        # Not the mean: while steps are traced, all threads work.
        waits = self._samples("keras_het.cpu.waiting")[:, self._workers == worker]
        return float(medians(waits)[0])

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

    def throttled(self, device: int, is_slow: bool, was_faster: bool) -> Fault | None:
        """Return why a device is clocked down; None if it is not, or it makes no difference."""
        clock = float(self.mean("keras_het.gpu.clock")[device])
        limit = float(self.mean("keras_het.gpu.clock_limit")[device])
        before = float(self.mean("keras_het.gpu.clock", recent=False)[device])
        fraction = clock / limit if 0 < clock <= limit else np.nan
        reason = self._reason(device, _HEAT_OR_POWER)
        if not (reason or is_slow or was_faster):
            return None
        if not reason and was_faster and not fraction > _FULL_CLOCK:
            reason = self._reason(device, _POWER_CAP)
        # A device without work lowers its clock itself.
        works = not self.mean("hw.gpu.utilization")[device] < _BUSY_DEVICE
        fell = was_faster and clock < _FULL_CLOCK * before
        if not reason and not (works and (fraction < _LOW_CLOCK or fell)):
            return None
        shown = "is clocked down"
        if fraction > 0:
            shown = f"runs at {clock / 1e6:.0f} of {limit / 1e6:.0f} MHz"
        because = f" because of {reason}" if reason else ""
        return Fault("throttled_device", shown + because, fraction, reason)

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


def host_faults(recording: Recording, readings: Readings) -> dict[int, Fault | None]:
    """Return what keeps CPUs from each worker; None if nothing is known to do so."""
    workers = np.array([device.worker for device in recording.devices], np.int64)
    everyone, first = np.unique(workers, return_index=True)
    on_cpu = {device.worker for device in recording.devices if device.kind == "CPU"}
    hosts = np.array([recording.devices[device].host for device in first])
    is_beside = hosts[:, None] == hosts
    np.fill_diagonal(is_beside, False)

    def of(name: str, recent: bool = True) -> Floats:
        return np.array([readings.of_worker(name, each, recent) for each in everyone], np.float64)

    budget, before = of("keras_het.cpu.budget"), of("keras_het.cpu.budget", recent=False)
    usage, load = of("process.cpu.usage"), of("system.cpu.utilization")
    stopped = of("keras_het.cpu.throttled")
    lost, used = 1.0 - budget / before, usage / budget
    # The host has as many CPUs as the budget at least.
    foreign = load - (usage + is_beside @ np.nan_to_num(usage)) / budget

    def fault(i: int) -> Fault | None:
        def found(
            kind: str, why: str, values: Floats, remedy: str = "", fraction: float = np.nan
        ) -> Fault:
            alike = np.isin(workers, everyone[values >= _ALIKE * values[i]])
            return Fault(kind, why, fraction, remedy, is_of_device=False, alike=alike)

        cpus = f"{budget[i]:.3g} CPU" + ("" if f"{budget[i]:.3g}" == "1" else "s")
        if stopped[i] >= _STOPPED:
            why = f"a CPU quota stops it for {stopped[i] * 100:.0f} % of the time"
            return found("host", why, stopped, "quota", max(1.0 - float(stopped[i]), 0.01))
        if lost[i] > _LOST_BUDGET:
            return found("host", f"it has {cpus} instead of {before[i]:.3g}", lost, "quota")
        if load[i] >= _BUSY_HOST and foreign[i] >= _OTHERS:
            why = (
                f"its host is {load[i] * 100:.0f} % busy, and other programs use at least "
                f"{foreign[i] * budget[i]:.2g} of its {cpus}"
            )
            return found("other_program", why, np.where(is_beside[i], np.inf, foreign))
        if everyone[i] not in on_cpu and used[i] >= _SATURATED:
            return found("host", f"it keeps {usage[i]:.3g} of its {cpus} busy", used)
        return None

    return {worker: fault(i) for i, worker in enumerate(everyone.tolist())}
