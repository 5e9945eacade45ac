"""Which GPU of NVML's list each of TensorFlow's is."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from keras_het.telemetry.nvml import Nvml

VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
FIXED_ORDER = "PCI_BUS_ID"


def cuda_devices(
    nvml: Nvml, models: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> list[Any]:
    """Return NVML's handles of the GPUs that CUDA numbers 0, 1, 2... in this process.

    CUDA's driver is asked for their UUIDs. Where it cannot be, `CUDA_VISIBLE_DEVICES` and
    `CUDA_DEVICE_ORDER` decide. Without the latter CUDA puts fast GPUs first, by rules that it does
    not tell: among different products the names in `models` then decide.
    """
    found = cuda_uuids()
    if found is not None:
        # the first fits a GPU, the second a part of one
        return [
            _first(nvml.ask("DeviceGetHandleByUUID", f"{kind}-{name}") for kind in ("GPU", "MIG"))
            for name in found
        ]
    environ = os.environ if environ is None else environ
    listed = _in_cuda_order(nvml, models, environ)
    text = environ.get(VISIBLE)
    chosen = listed if text is None else list(_chosen(nvml, text, listed))
    return [_first([*nvml.parts_of(device), device]) if device else None for device in chosen]


def cuda_uuids() -> list[str] | None:
    """Return the UUIDs of the GPUs, or parts of GPUs, that this process sees, in CUDA's order."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        # version 2 tells the UUID of a MIG device instead of that of its GPU
        uuid_of = getattr(driver, "cuDeviceGetUuid_v2", None) or driver.cuDeviceGetUuid
        count = ctypes.c_int()
        if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
            return None
        found = []
        for index in range(count.value):
            device, name = ctypes.c_int(), (ctypes.c_ubyte * 16)()
            if driver.cuDeviceGet(ctypes.byref(device), index) or uuid_of(name, device):
                return None
            found.append(str(uuid.UUID(bytes=bytes(name))))
    except (OSError, AttributeError):
        return None
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


def _in_cuda_order(nvml: Nvml, models: Sequence[str], environ: Mapping[str, str]) -> list[Any]:
    gpus = nvml.gpus()
    names = [nvml.name_of(gpu) if gpu else "" for gpu in gpus]
    if environ.get(ORDER) == FIXED_ORDER or len(set(names)) <= 1:
        return gpus
    if sorted(models) != sorted(names):  # some are hidden, or TensorFlow was not asked
        return [None] * len(gpus)
    # among GPUs of one product the order is that of the bus
    return [gpus[place] for place in _places(models, names)]


def _places(models: Sequence[str], names: Sequence[str]) -> Iterator[int]:
    left = list(range(len(names)))
    for model in models:
        place = next(place for place in left if names[place] == model)
        left.remove(place)
        yield place


def _chosen(nvml: Nvml, text: str, listed: Sequence[Any]) -> Iterator[Any]:
    """The devices of CUDA_VISIBLE_DEVICES; as in CUDA, nothing counts behind a wrong entry."""
    seen = []
    for entry in (part.strip() for part in text.split(",")):
        if entry in seen:  # CUDA then shows none at all; TensorFlow has none to ask for
            return
        seen.append(entry)
        if entry.isdecimal():
            if int(entry) >= len(listed):
                return
            yield listed[int(entry)]
        else:
            device = _named(nvml, entry)
            if device is None:
                return
            yield device


def _named(nvml: Nvml, entry: str) -> Any:
    """The device of a UUID, which may be abbreviated."""
    if not entry.startswith(("GPU-", "MIG-")):
        return None
    wholes = [gpu for gpu in nvml.gpus() if gpu]
    devices = [*wholes, *(part for gpu in wholes for part in nvml.parts_of(gpu))]
    names = [str(nvml.ask("DeviceGetUUID", device) or "") for device in devices]
    fitting = [
        device for device, name in zip(devices, names, strict=True) if name.startswith(entry)
    ]
    return fitting[0] if len(fitting) == 1 else None


def _first(devices: Any) -> Any:
    return next((device for device in devices if device is not None), None)
