"""What is planned: a model, devices, and how steps are run."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from keras_het.planning.bounded_shares import FloatArray
from keras_het.planning.pipeline.devices import Devices
from keras_het.planning.pipeline.model_profile import ModelProfile

# No stage takes no time: micro-batches would be routed anywhere.
TINY = 1e-15


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is planned."""

    profile: ModelProfile
    devices: Devices
    micro_batches: int
    schedule: str
    recompute: str
    cuts: tuple[int, ...]
    all_cuts: bool = False

    @functools.cached_property
    def least_cuts(self) -> FloatArray:
        """The fewest bytes that cross a cut before a unit of the stage from cut i to j, [Q, Q]."""
        cuts = np.asarray(self.cuts)
        result = np.full((len(cuts), len(cuts)), np.inf)
        for row, first in enumerate(cuts[:-1]):
            least = np.minimum.accumulate(self.profile.cut_bytes[first:])
            result[row, row + 1 :] = least[cuts[row + 1 :] - 1 - first]
        return result

    def recomputation_seconds(self, group: tuple[int, ...]) -> FloatArray:
        """Return what recomputing each unit costs a micro-batch, float64 [L], in seconds.

        The mean over replicas, weighted by their speed.
        """
        members = list(group)
        forward = self.profile.forward_seconds[:, members]
        seconds = (forward + self.profile.backward_seconds[:, members]).sum(axis=0)
        speeds = 1 / np.maximum(seconds, TINY)
        cost: FloatArray = forward @ (speeds / speeds.sum())
        return cost
