"""What is planned: a model, devices, and how steps are run."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from keras_het.planning.pipeline.plan import check_plan_options
from keras_het.planning.shares import FloatArray

Link = tuple[str, int, int]


def _make_array(owner: object, name: str, shape: tuple[int, ...], finite: bool = True) -> None:
    """Make a field float64, and refuse one of another shape, or with numbers out of range."""
    given = np.array(getattr(owner, name), np.float64)
    if given.shape != shape:
        raise ValueError(
            f"{name} must have shape {shape}: a row for each unit or device, one more for cuts. "
            f"Received: shape {given.shape}. Give a number for each."
        )
    wrong = ~(given >= 0) | (finite & np.isinf(given))
    if wrong.any():
        raise ValueError(
            f"Every number in {name} must be 0 or more{' and finite' if finite else ''}. "
            f"Received: {given[wrong][0]}. Measure again."
        )
    given.flags.writeable = False
    object.__setattr__(owner, name, given)


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
        _make_array(self, "bytes_per_second", (number, number), finite=False)
        _make_array(self, "latency_seconds", (number, number), finite=False)
        _make_array(self, "memory_bytes", (number,), finite=False)
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


@dataclasses.dataclass(frozen=True)
class ModelProfile:
    """What one micro-batch costs, for each of L units (calls of layers, in order) on D devices.

    A cut at i lies before unit i: units 0 .. i - 1 come before it, and 0 <= i <= L.

    Args:
        names: name of each unit, [L].
        forward_seconds: time of the forward pass, float64 [L, D].
        backward_seconds: time of the backward pass without recomputation, float64 [L, D].
        activation_bytes: what is kept from forward to backward, float64 [L].
        weight_bytes: weights that have a gradient, float64 [L]; the all-reduce moves as many bytes.
        state_bytes: weights, gradients and optimizer slots together, float64 [L].
        cut_bytes: what crosses a cut before unit i forward, float64 [L + 1]; 0 at both ends.
        gradient_bytes: what comes back over that cut, float64 [L + 1].
        together: (first, last) of units that must be in one stage, because they share weights.

    Raises:
        ValueError: if a shape does not fit, or a number is negative or not finite.
    """

    names: tuple[str, ...]
    forward_seconds: FloatArray
    backward_seconds: FloatArray
    activation_bytes: FloatArray
    weight_bytes: FloatArray
    state_bytes: FloatArray
    cut_bytes: FloatArray
    gradient_bytes: FloatArray
    together: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        units = len(self.names)
        if not units:
            raise ValueError("A profile needs at least one unit. Received: no names. Name them.")
        devices = max((1, *np.shape(self.forward_seconds)[1:2]))
        for name in ("forward_seconds", "backward_seconds"):
            _make_array(self, name, (units, devices))
        for name in ("activation_bytes", "weight_bytes", "state_bytes"):
            _make_array(self, name, (units,))
        for name in ("cut_bytes", "gradient_bytes"):
            _make_array(self, name, (units + 1,))
        for first, last in self.together:
            if not 0 <= first <= last < units:
                raise ValueError(
                    f"Units that stay together must be from 0 to {units - 1}. "
                    f"Received: together={self.together}. Give the first and the last of them."
                )

    @property
    def num_units(self) -> int:
        """Number of units, L."""
        return len(self.names)

    @property
    def num_devices(self) -> int:
        """Number of devices, D."""
        return int(self.forward_seconds.shape[1])

    @functools.cached_property
    def columns(self) -> list[tuple[list[float], list[float]]]:
        """Seconds of each unit forward and backward, for each device."""
        both = self.forward_seconds.T.tolist(), self.backward_seconds.T.tolist()
        return list(zip(*both, strict=True))

    def allowed_cuts(self) -> tuple[int, ...]:
        """Return where the model may be cut, 0 and L included."""
        inside = {cut for first, last in self.together for cut in range(first + 1, last + 1)}
        return tuple(cut for cut in range(self.num_units + 1) if cut not in inside)


# No stage takes no time: micro-batches would be routed anywhere.
TINY = 1e-15
Group = tuple[int, ...]


class Chain(NamedTuple):
    """Stages: stage s has the units from `cuts[s]` to before `cuts[s + 1]`, on `groups[s]`."""

    cuts: tuple[int, ...]
    groups: tuple[Group, ...]


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is planned."""

    profile: ModelProfile
    devices: Devices
    num_micro_batches: int
    schedule: str
    recompute: str
    cuts: tuple[int, ...]
    all_cuts: bool = False

    def __post_init__(self) -> None:
        check_plan_options(self.num_micro_batches, self.schedule, self.recompute)
        if self.profile.num_devices != self.devices.num_devices:
            raise ValueError(
                "The profile must have a column for each device. Received: "
                f"{self.profile.num_devices} columns, {self.devices.num_devices} devices. "
                "Measure every unit on every device."
            )

    @functools.cached_property
    def limited(self) -> bool:
        """Whether a device's memory has a limit."""
        return bool(np.isfinite(self.devices.memory_bytes).any())
