"""Something that may have made steps longer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from keras_het.planning.diagnosis.recording import Floats


@dataclasses.dataclass(frozen=True)
class Suspect:
    """A possible cause, and the time that would be saved without it.

    Savings of several suspects add up; a time never falls below 0.
    """

    kind: str
    devices: tuple[int, ...]
    own: Floats
    transfer: Floats
    why: str
    worker: int | None = None
    since: bool = False
    advice: str = ""
    phase: str = "compute"
    parts: tuple[Suspect, ...] = ()

    @staticmethod
    def joined(suspects: Sequence[Suspect]) -> Suspect:
        """Return suspects of a kind as one, described by the one that saves most."""
        first, *others = sorted(suspects, key=Suspect.size, reverse=True)
        if not others:
            return first
        devices = dict.fromkeys(device for each in (first, *others) for device in each.devices)
        return dataclasses.replace(
            first,
            devices=tuple(devices) if all(each.devices for each in suspects) else (),
            own=np.sum([each.own for each in suspects], axis=0),
            transfer=np.sum([each.transfer for each in suspects], axis=0),
            parts=(first, *others),
        )

    @property
    def told(self) -> tuple[Suspect, ...]:
        """Its parts that are of the kind that `why` tells of, such as the input of each worker."""
        return tuple(each for each in self.parts or (self,) if each.phase == self.phase)

    @property
    def follows(self) -> bool:
        """Whether devices would save time because shares follow the repair of another one."""
        others = np.ones(self.own.shape[1], np.bool_)
        others[list(self.devices)] = False
        return bool(self.own[:, others].any())

    def size(self) -> float:
        """Return the mean time that would be saved on the device with the largest saving."""
        own = float(self.own.mean(axis=0).max(initial=0.0)) if len(self.own) else 0.0
        return own + (float(self.transfer.mean()) if len(self.transfer) else 0.0)
