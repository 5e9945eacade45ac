"""Something that may have made steps longer."""

from __future__ import annotations

import dataclasses

from keras_het.planning.diagnosis.recording import Floats


@dataclasses.dataclass(frozen=True)
class Suspect:
    """A possible cause, and the time that would be saved without it.

    Savings of several suspects add up; a time never falls below 0.

    Args:
        kind: as in `Cause`.
        devices: indices of the devices concerned, the worst one first; none for a link of all.
        own: float64 of shape [T, N], seconds that each replica would be ready earlier.
        transfer: float64 of shape [T], seconds of transfer that would be saved.
        why: what the numbers say, with the device or worker as the subject.
        worker: the worker that `why` is about, if it is not about a device.
        since: whether the device has been faster.
        advice: what `Throttle` and `HostState` know about the repair.
    """

    kind: str
    devices: tuple[int, ...]
    own: Floats
    transfer: Floats
    why: str
    worker: int | None = None
    since: bool = False
    advice: str = ""

    def joined(self, other: Suspect) -> Suspect:
        """Return both as one, described by the one that saves more.

        Args:
            other: a suspect of the same kind.
        """
        first, second = sorted((self, other), key=Suspect.size, reverse=True)
        devices = (*first.devices, *(d for d in second.devices if d not in first.devices))
        return dataclasses.replace(
            first,
            devices=devices if self.devices and other.devices else (),
            own=self.own + other.own,
            transfer=self.transfer + other.transfer,
        )

    def size(self) -> float:
        """Return the mean time that would be saved on the device with the largest saving."""
        own = float(self.own.mean(axis=0).max(initial=0.0)) if len(self.own) else 0.0
        return own + (float(self.transfer.mean()) if len(self.transfer) else 0.0)
