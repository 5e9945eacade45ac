"""Devices of a pipeline and the links between them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from keras_het.planning.bounded_shares import FloatArray

Link = tuple[str, int, int]


@dataclasses.dataclass(frozen=True)
class Devices:
    """D devices, the hosts they are in, their links and their memory.

    Args:
        names: name of each device, [D], such as "worker 0 GPU:0".
        hosts: number of the process or host of each device, [D].
        bytes_per_second: rate from device i to device j, float64 [D, D]; inf where nothing is
            copied.
        latency_seconds: time before the first byte of a transfer arrives, float64 [D, D].
        memory_bytes: what a device can hold, float64 [D]; inf for no limit.

    Raises:
        ValueError: if a shape does not fit, or a number is out of range.
    """

    names: tuple[str, ...]
    hosts: tuple[int, ...]
    bytes_per_second: FloatArray
    latency_seconds: FloatArray
    memory_bytes: FloatArray

    def __post_init__(self) -> None:
        number = len(self.names)
        if not number:
            raise ValueError("A pipeline needs a device. Received: no names. Name at least one.")
        if len(self.hosts) != number:
            raise ValueError(
                f"Each of {number} devices needs the number of its host. "
                f"Received: hosts={self.hosts}. Give one number for each device."
            )
        for name, shape in (
            ("bytes_per_second", (number, number)),
            ("latency_seconds", (number, number)),
            ("memory_bytes", (number,)),
        ):
            given = np.array(getattr(self, name), np.float64)
            if given.shape != shape:
                raise ValueError(
                    f"{name} must have shape {shape}, because there are {number} devices. "
                    f"Received: shape {given.shape}. Give a number for each "
                    f"{'pair of devices' if len(shape) == 2 else 'device'}."
                )
            if np.isnan(given).any() or (given < 0).any():
                raise ValueError(
                    f"Numbers in {name} must not be negative or NaN. "
                    f"Received: {given.tolist()}. Measure again."
                )
            given.flags.writeable = False
            object.__setattr__(self, name, given)
        apart = ~np.eye(number, dtype=bool)
        if (self.bytes_per_second[apart] == 0).any() or np.isinf(self.latency_seconds).any():
            raise ValueError(
                "Every device must reach every other one. Received: a rate of 0 bytes per second "
                "or an infinite latency. Leave out the device that cannot be reached."
            )

    @property
    def num_devices(self) -> int:
        """Number of devices, D."""
        return len(self.names)

    def transfer_seconds(self, sender: int, receiver: int, num_bytes: float) -> float:
        """Return the time of one transfer; 0 if there is nothing to send."""
        if sender == receiver or num_bytes <= 0:
            return 0.0
        rate = self.bytes_per_second[sender, receiver]
        return float(self.latency_seconds[sender, receiver] + num_bytes / rate)

    def link(self, sender: int, receiver: int) -> Link:
        """Return what a transfer occupies: one direction of a pair of hosts, or of devices."""
        hosts = self.hosts[sender], self.hosts[receiver]
        if hosts[0] != hosts[1]:
            return ("hosts", *hosts)
        return ("devices", sender, receiver)

    def ring(self, group: Sequence[int]) -> tuple[int, ...]:
        """Return the devices of a group in the order of a ring, those of a host side by side."""
        return tuple(sorted(group, key=lambda device: (self.hosts[device], device)))

    def all_reduce_terms(self, group: Sequence[int]) -> tuple[float, float]:
        r"""Return the time of an all-reduce as seconds, and seconds per byte.

        The devices of a host add up first; then the hosts do. A ring of r members takes

        .. math:: 2 (r - 1) latency + 2 (r - 1) / r \cdot bytes / rate

        with its slowest link.
        """
        members = list(self.ring(group))
        hosts = [self.hosts[device] for device in members]
        inside = [[d for d in members if self.hosts[d] == host] for host in dict.fromkeys(hosts)]
        own = [self._ring_terms(devices) for devices in inside]
        fixed, per_byte = self._ring_terms([devices[0] for devices in inside])
        return fixed + max(f for f, _ in own), per_byte + max(b for _, b in own)

    def _ring_terms(self, members: Sequence[int]) -> tuple[float, float]:
        r = len(members)
        if r < 2:
            return 0.0, 0.0
        ring = np.array(members)
        following = np.roll(ring, -1)
        rate = float(self.bytes_per_second[ring, following].min())
        latency = float(self.latency_seconds[ring, following].max())
        return 2 * (r - 1) * latency, 2 * (r - 1) / (r * rate)

    def all_reduce_seconds(self, group: Sequence[int], num_bytes: float) -> float:
        """Return the time of a ring all-reduce; 0 if there is nothing to reduce."""
        fixed, per_byte = self.all_reduce_terms(group)
        return fixed + num_bytes * per_byte if num_bytes > 0 else 0.0
