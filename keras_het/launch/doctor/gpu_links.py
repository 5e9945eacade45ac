"""How the GPUs of this machine are joined, as NVIDIA's driver says."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from keras_het.telemetry.hardware import Nvml

# NVML's numbers: that of NVML_P2P_CAPS_INDEX_READ is a tuple in some versions of `pynvml`
_READ, _NVLINK = 0, 2
_OK, _ACTIVE = 0, 1
_MOST_NVLINKS = 36
_PCIE = {
    0: "PCIe, on one board",
    10: "PCIe, by one switch",
    20: "PCIe, by several switches",
    30: "PCIe, by the host bridge of a CPU",
    40: "PCIe, by two host bridges of a CPU",
    50: "PCIe, across CPU sockets",
}
_LAST_OF_SWITCHES = 20


@dataclasses.dataclass(frozen=True)
class GpuLink:
    """What lies between two GPUs, by their indices.

    `copies` says whether the driver allows direct copies, None if that is unknown; `by_cpu` whether
    the way leads through a CPU.
    """

    first: int
    second: int
    way: str
    copies: bool | None = None
    by_cpu: bool = False


def list_gpu_links(nvml: Nvml, gpus: Sequence[Any]) -> tuple[GpuLink, ...]:
    """Ask about each pair of GPUs, None for lost ones; parts of a divided GPU have no links."""
    whole = [
        (index, gpu) for index, gpu in enumerate(gpus) if gpu is not None and not nvml.parts_of(gpu)
    ]
    return tuple(_link(nvml, *pair) for pair in itertools.combinations(whole, 2))


def _link(nvml: Nvml, first: tuple[int, Any], second: tuple[int, Any]) -> GpuLink:
    (index, gpu), (other_index, other) = first, second
    count = _direct_nvlinks(nvml, gpu, other)
    if count:
        return GpuLink(index, other_index, f"NVLink ({count} direct)", True)
    if nvml.ask("DeviceGetP2PStatus", gpu, other, _NVLINK) == _OK:
        # the links of both end in a switch, so none has the other at its end
        return GpuLink(index, other_index, "NVLink, by switches", True)
    ancestor = nvml.ask("DeviceGetTopologyCommonAncestor", gpu, other)
    status = nvml.ask("DeviceGetP2PStatus", gpu, other, _READ)
    return GpuLink(
        index,
        other_index,
        _PCIE.get(ancestor, "unknown"),
        None if status is None else status == _OK,
        ancestor is not None and ancestor > _LAST_OF_SWITCHES,
    )


def _direct_nvlinks(nvml: Nvml, gpu: Any, other: Any) -> int:
    place = _bus_place(nvml.ask("DeviceGetPciInfo", other))
    if place is None:
        return 0
    active = [
        link
        for link in range(_MOST_NVLINKS)
        if nvml.ask("DeviceGetNvLinkState", gpu, link) == _ACTIVE
    ]
    ends = [_bus_place(nvml.ask("DeviceGetNvLinkRemotePciInfo", gpu, link)) for link in active]
    return ends.count(place)


def _bus_place(info: Any) -> tuple[int, int, int] | None:
    """Return where on the bus; texts of it differ in the width of their numbers."""
    return None if info is None else (info.domain, info.bus, info.device)
