r"""How many samples the memory of a device holds, by what its steps have needed so far.

TensorFlow counts the bytes in use, and the most so far. Where a step of :math:`b` samples has
needed no more than the peak :math:`p` and :math:`r` bytes stay between steps, a sample needs at
most :math:`(p - r) / b`. This is too much where a step has fixed costs, such as the workspace of a
convolution: the bound then grows with the shares, and never lies above what fits.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_het import private_api
from keras_het.planning.replica_layout import ReplicaLayout
from keras_het.planning.shares import IntArray

UNKNOWN = 0
"""The device counts no bytes, as a CPU."""
NOT_YET = -1
"""It does, and no step was measured."""

# The allocator's blocks do not fit together without gaps.
USABLE = 0.9
_MOST = 2**24  # samples travel in float32


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of a device: in use now, most in use so far, and all that TensorFlow may take."""

    current: int
    peak: int
    limit: int


def memory_of(device: str) -> Memory | None:
    """Return what TensorFlow knows of a device's memory; nothing is waited for."""
    limit = private_api.memory_limits().get(device)
    if limit is None or "CPU" in device:
        return None
    try:
        used: Any = tf.config.experimental.get_memory_info(device)
    except (ValueError, tf.errors.OpError):  # a plug-in without these counts
        return None
    return Memory(used["current"], used["peak"], limit)


class MemoryUse:
    """Most samples at a time that fit the memory of this worker's replicas."""

    def __init__(self, layout: ReplicaLayout, devices: Sequence[str], cuts: bool) -> None:
        self._cuts = cuts
        self._devices = dict(zip(layout.local_replicas, devices, strict=True))
        self._bytes_per_sample = dict.fromkeys(self._devices, math.inf)
        self._largest = dict.fromkeys(self._devices, 1)
        self.fitting: IntArray = np.full(layout.num_replicas, UNKNOWN)
        for replica, device in self._devices.items():
            if memory_of(device) is not None:
                self.fitting[replica] = NOT_YET

    def start_from(self, replica: int, samples: int) -> None:
        """Take what fitted in an earlier training."""
        if replica in self._devices and self.fitting[replica] == NOT_YET:
            self.fitting[replica] = self._largest[replica] = samples

    def note(self, shares: IntArray) -> bool:
        """Look at the memory after a step with these shares; return whether more or less fits."""
        # What has been computed fits. A share that is computed in parts says nothing more.
        before = self.fitting.copy()
        for replica, device in self._devices.items():
            share, fits = int(shares[replica]), int(self.fitting[replica])
            is_cut = self._cuts and 0 < fits < share
            if fits == UNKNOWN or share < 1 or is_cut:
                continue
            self._largest[replica] = largest = max(self._largest[replica], share)
            memory = memory_of(device)
            if memory is None or memory.peak <= memory.current:
                # no peak is counted, or somebody has reset it: no reason to hold the share
                self.fitting[replica] = max(fits, UNKNOWN)
                continue
            each = min(self._bytes_per_sample[replica], (memory.peak - memory.current) / share)
            self._bytes_per_sample[replica] = each
            room = int((USABLE * memory.limit - memory.current) / each)
            self.fitting[replica] = min(max(room, largest), _MOST)
        return bool((self.fitting != before).any())
