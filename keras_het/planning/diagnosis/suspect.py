"""A possible cause of longer steps, and the time that steps would save without it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from keras_het.planning.diagnosis.readings import Fault
from keras_het.planning.diagnosis.recording import Floats
from keras_het.planning.diagnosis.situation import Situation
from keras_het.planning.diagnosis.statistics import means, medians
from keras_het.planning.diagnosis.steps import step_seconds

# Waits for input come in bursts, which must count; a single long step must not.
_MOST_MEDIANS_OF_OWN = 8.0
# What is no stall happens in most parts of so many steps.
_STEPS_OF_A_PART = 10


@dataclasses.dataclass(frozen=True)
class Suspect:
    """A possible cause; without it steps have other `Steps.times`, lower ones by `saved`."""

    # Savings of several suspects add up; a time never falls below 0.

    fault: Fault
    devices: tuple[int, ...]
    saved: Floats
    phase: str = "compute"
    parts: tuple[Suspect, ...] = ()

    @staticmethod
    def joined(suspects: Sequence[Suspect]) -> Suspect:
        """Return suspects of a kind as one, described by the one that saves most."""
        parts = tuple(sorted(suspects, key=Suspect.size, reverse=True))
        devices = dict.fromkeys(device for part in parts for device in part.devices)
        saved = np.sum([part.saved for part in suspects], axis=0)
        return dataclasses.replace(parts[0], devices=tuple(devices), saved=saved, parts=parts)

    @property
    def described(self) -> tuple[Suspect, ...]:
        """Its parts that the text is about, such as the input of each worker."""
        return tuple(part for part in self.parts if part.phase == self.phase)

    @property
    def follows(self) -> bool:
        """Whether devices would save time because shares follow the repair of another one."""
        return bool(np.delete(self.saved[:, :-1], list(self.devices), axis=1).any())

    def size(self) -> float:
        """Return the largest mean saving of a device, or that of the transfer."""
        return float(self.saved.mean(axis=0).max())


def seconds_saved(
    situation: Situation, suspects: Iterable[Suspect], already: Iterable[Suspect] = ()
) -> Floats:
    """Return by how many seconds a step is shorter without some suspects, in three ways."""
    # The mean over steps; that between mean times, without waits because of noise; and the mean in
    # a usual part of the steps, without what happens in a few of them.
    before, after = (times_without(situation, each) for each in (already, suspects))
    by_step = step_seconds(before) - step_seconds(after)
    parts = np.array_split(by_step, max(len(by_step) // _STEPS_OF_A_PART, 1))
    usual = medians(np.array([part.mean() for part in parts]))
    by_mean = _of_mean_times(before) - _of_mean_times(after)
    return np.array([situation.recent.mean(by_step), by_mean, usual])


def _of_mean_times(times: Floats) -> float:
    own, transfer = times[:, :-1], times[:, -1]
    return float(means(own, _MOST_MEDIANS_OF_OWN).max() + transfer.mean())


def times_without(situation: Situation, suspects: Iterable[Suspect]) -> Floats:
    """Return what `Steps.times` would be without some suspects."""
    times = situation.recent.times
    for suspect in suspects:
        times = times - suspect.saved
    return np.maximum(times, 0.0)
