"""What samples of the hardware say about a slow device."""

from __future__ import annotations

import dataclasses

import numpy as np

from keras_het.planning.diagnosis.middles import means
from keras_het.planning.diagnosis.recording import Floats, Recording

# Bits of NVML's clock event reasons that mean a fault; power cap alone is common under load.
POWER_CAP = 0x4
HEAT_OR_POWER = 0x8 | 0x20 | 0x40 | 0x80
REASONS = {
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
# Beyond this a reading is a mistake.
_LARGEST = 1e18
_MOST_SAMPLES = 200


@dataclasses.dataclass(frozen=True)
class Throttle:
    """Why a device is clocked down."""

    why: str
    fraction: float
    reason: str
    certain: bool


class Readings:
    """Means of the hardware's samples in recent steps, and before."""

    def __init__(self, recording: Recording, first: int) -> None:
        self._recording = recording
        self._workers = np.array([device.worker for device in recording.devices], np.int64)
        recent = np.asarray(recording.hardware_steps) >= first
        if not recent.any() and len(recent):
            recent[-1] = True  # sampled rarely: the latest sample stands
        self._recent = recent
        self._means: dict[tuple[str, bool], Floats] = {}

    def now(self, name: str) -> Floats:
        """Return the mean of a quantity in recent steps, of shape [N]; NaN where unknown."""
        return self._mean(name, recent=True)

    def before(self, name: str) -> Floats:
        """Return the mean of a quantity before them, of shape [N]; NaN where unknown."""
        return self._mean(name, recent=False)

    def of_worker(self, name: str, worker: int, recent: bool = True) -> float:
        """Return the mean of a quantity over a worker's devices; NaN where unknown."""
        values = self._mean(name, recent)[self._workers == worker]
        return float(means(values[:, None])[0])

    def knows_clock(self, device: int) -> bool:
        """Tell whether clocks or reasons for low ones are known of a device."""
        clock = self.now("keras_het.gpu.clock") + self.now("keras_het.gpu.clock_limit")
        reasons = self.now("keras_het.gpu.throttle_reasons")
        return bool(np.isfinite(clock[device]) or np.isfinite(reasons[device]))

    def knows_host(self, worker: int) -> bool:
        """Tell whether anything is known of the CPUs of a worker."""
        return any(
            np.isfinite(self.of_worker(name, worker))
            for name in ("keras_het.cpu.throttled", "process.cpu.usage", "system.cpu.utilization")
        )

    def throttled(self, device: int, degraded: bool) -> Throttle | None:
        """Return why a device is clocked down; None if it is not."""
        clock = float(self.now("keras_het.gpu.clock")[device])
        limit = float(self.now("keras_het.gpu.clock_limit")[device])
        before = float(self.before("keras_het.gpu.clock")[device])
        fraction = clock / limit if 0 < clock <= limit else np.nan
        reason = self._reason(device, HEAT_OR_POWER)
        certain = bool(reason)
        if not reason and degraded and not fraction > _FULL_CLOCK:
            reason = self._reason(device, POWER_CAP)
        # A device without work lowers its clock itself.
        works = not self.now("hw.gpu.utilization")[device] < _BUSY_DEVICE
        fell = degraded and clock < _FULL_CLOCK * before
        if not reason and not (works and (fraction < _LOW_CLOCK or fell)):
            return None
        because = f" because of {reason}" if reason else ""
        if fraction > 0:
            shown = f"runs at {clock / 1e6:.0f} of {limit / 1e6:.0f} MHz{because}"
        else:
            shown = f"is clocked down{because}"
        return Throttle(shown, fraction, reason, certain)

    def other_program_on(self, device: int) -> str | None:
        """Return what shows another program on a device; None if nothing does."""
        used, before = (
            float(values[device])
            for values in (self.now("hw.gpu.utilization"), self.before("hw.gpu.utilization"))
        )
        memory = self.now("hw.gpu.memory.usage") - self.before("hw.gpu.memory.usage")
        more = float((memory / self.now("hw.gpu.memory.limit"))[device])
        if more > _MORE_MEMORY:
            return f"{more * 100:.0f} % more of its memory are in use than before"
        if used - before > _MORE_USED:
            return f"its utilization rose from {before * 100:.0f} to {used * 100:.0f} %"
        return None

    def _reason(self, device: int, bits: int) -> str:
        values = self._recording.hardware.get("keras_het.gpu.throttle_reasons")
        if values is None:
            return ""
        column = np.asarray(values, np.float64)[self._recent, device]
        column = column[np.isfinite(column) & (column >= 0) & (column < 2**53)].astype(np.int64)
        for bit, text in REASONS.items():
            if bit & bits and len(column) and ((column & bit) > 0).mean() >= _OFTEN:
                return text
        return ""

    def _mean(self, name: str, recent: bool) -> Floats:
        if (name, recent) not in self._means:
            values = self._recording.hardware.get(name)
            if values is None:
                result = np.full(len(self._recording.devices), np.nan)
            else:
                rows = np.flatnonzero(self._recent == recent)
                chosen = np.asarray(values, np.float64)[rows[:: max(len(rows) // _MOST_SAMPLES, 1)]]
                result = means(np.where(np.abs(chosen) < _LARGEST, chosen, np.nan))
            self._means[name, recent] = result
        return self._means[name, recent]
