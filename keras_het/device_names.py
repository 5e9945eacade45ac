"""Products and identities of the devices that this process computes on."""

from __future__ import annotations

import contextlib
import ctypes
import platform
import re
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_CPUINFO = Path("/proc/cpuinfo")


def product_names(devices: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the products that are known without NVML; empty if unknown."""
    logical = tensorflow_gpus() or []
    places = [int(gpu.partition(":")[2]) if gpu else -1 for gpu in map(gpu_name, devices)]
    return tuple(
        processor_name() if place < 0 else logical[place][1] if place < len(logical) else ""
        for place in places
    )


def identities(devices: Sequence[str]) -> tuple[str, ...]:
    """Return what stays when a process starts again: a GPU's UUID, else host and name."""
    uuids = cuda_uuids() if any(map(gpu_name, devices)) else []
    found = []
    for name in devices:
        gpu = gpu_name(name)
        place = cuda_index(gpu, tensorflow_gpus()) if gpu else -1
        is_known = 0 <= place < len(uuids)
        own_name = ":".join(name.split(":")[-2:])
        found.append(f"GPU-{uuids[place]}" if is_known else f"{platform.node()} {own_name}")
    return tuple(found)


def cuda_index(gpu: str, logical: Sequence[tuple[int, str]] | None) -> int:
    """Return CUDA's index of TensorFlow's "GPU:i", -1 if there is none."""
    place = int(gpu.partition(":")[2])
    if not logical:
        return place
    return logical[place][0] if place < len(logical) else -1


def processor_name(cpuinfo: Path = _CPUINFO) -> str:
    """Return the name of this machine's processor, empty if it is hidden."""
    try:
        found = re.search(r"^model name\s*:\s*(.*\S)", cpuinfo.read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor()


def gpu_name(device: str) -> str:
    """Return "GPU:i" for TensorFlow's name of a GPU, empty for other devices."""
    found = re.search(r"(?:^|[/:])(GPU:\d+)$", device, re.IGNORECASE)
    return found[1].upper() if found else ""


def cuda_uuids() -> list[str]:
    """Return the UUIDs of the GPUs, or parts of GPUs, that this process sees, in CUDA's order."""
    found = []
    # an OSError without a driver, an AttributeError with one older than TensorFlow wants
    with contextlib.suppress(OSError, AttributeError):
        driver = ctypes.CDLL("libcuda.so.1")
        # version 2 tells the UUID of a MIG device instead of that of its GPU
        uuid_of = getattr(driver, "cuDeviceGetUuid_v2", None) or driver.cuDeviceGetUuid
        count = ctypes.c_int()
        if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
            return []
        for index in range(count.value):
            device, name = ctypes.c_int(), (ctypes.c_ubyte * 16)()
            if driver.cuDeviceGet(ctypes.byref(device), index) or uuid_of(name, device):
                return []
            found.append(str(uuid.UUID(bytes=bytes(name))))
    return found


def tensorflow_gpus() -> list[tuple[int, str]] | None:
    """Return CUDA's index and the product name of each of TensorFlow's logical GPUs."""
    tf: Any = sys.modules.get("tensorflow")
    config = getattr(tf, "config", None)
    if config is None:
        return None
    found = []
    # a RuntimeError: another thread, or the script, is just setting the devices up
    with contextlib.suppress(RuntimeError, ValueError):
        for device in config.get_visible_devices("GPU"):
            details = config.experimental.get_device_details(device)
            index = int(device.name.rpartition(":")[2])
            # several logical devices may share a GPU's memory
            parts = config.get_logical_device_configuration(device) or [None]
            found += [(index, str(details.get("device_name", "")))] * len(parts)
    return found
