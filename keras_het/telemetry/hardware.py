"""Samples of what the devices of a worker, its process and its machine are busy with."""

from __future__ import annotations

import logging
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keras_het.cgroups import CGROUPS
from keras_het.planning.diagnosis.recording import HARDWARE
from keras_het.telemetry.cuda_devices import FIXED_ORDER, ORDER, cuda_devices, tensorflow_gpus
from keras_het.telemetry.gpu_values import GpuValues
from keras_het.telemetry.host_values import HostValues
from keras_het.telemetry.nvml import Nvml, NvmlMissingError

Samples = np.ndarray[Any, np.dtype[np.float32]]

_CPUINFO = Path("/proc/cpuinfo")
_logger = logging.getLogger("keras_het")


class HardwareSampler:
    """Samples the hardware of one worker process.

    It starts no thread and waits for nothing: whoever wants samples calls `sample`, from one thread
    at a time. Without GPUs a sample takes about 0.6 ms. What cannot be known is NaN, and a reason
    that somebody can remove is one warning.
    """

    def __init__(
        self,
        devices: Sequence[str],
        cgroups: Path = CGROUPS,
        membership: Path | None = None,
    ) -> None:
        self.names = tuple(HARDWARE)
        self._columns = {name: column for column, name in enumerate(self.names)}
        self._host = HostValues(cgroups, membership)
        self._nvml = _open_nvml(devices)
        handles = _handles(self._nvml, devices) if self._nvml else {}
        self._gpus = [
            GpuValues(self._nvml, handles[name], gpu_name(name) or name)
            if self._nvml and name in handles
            else None
            for name in devices
        ]

    def sample(self) -> Samples:
        """Return the values now; rates are those since the last call, and NaN in the first."""
        rows = np.full((len(self._gpus), len(self.names)), np.nan, np.float32)
        host = self._host.read()
        for row, gpu in zip(rows, self._gpus, strict=True):
            values: Mapping[str, float] = {**host, **gpu.read()} if gpu else host
            for name, value in values.items():
                row[self._columns[name]] = value
        return rows

    def close(self) -> None:
        """Give NVIDIA's management library back; a second call does nothing."""
        if self._nvml:
            self._nvml.close()


def describe_devices(devices: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the products, such as "NVIDIA A100-SXM4-40GB"; empty if unknown."""
    nvml = _open_nvml(devices)
    handles = _handles(nvml, devices) if nvml else {}
    logical = tensorflow_gpus() or []
    found = []
    for name in devices:
        gpu = gpu_name(name)
        if nvml and name in handles:
            found.append(nvml.name_of(handles[name]))
        elif gpu:
            place = int(gpu.partition(":")[2])
            found.append(logical[place][1] if place < len(logical) else "")
        else:
            found.append(processor_name())
    if nvml:
        nvml.close()
    return tuple(found)


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


def _open_nvml(devices: Sequence[str]) -> Nvml | None:
    if not any(map(gpu_name, devices)):
        return None
    try:
        return Nvml()
    except NvmlMissingError as error:
        _logger.warning("Load, memory and clocks of the GPUs are unknown. %s", error)
        return None


def _handles(nvml: Nvml, devices: Sequence[str]) -> dict[str, Any]:
    """NVML's handles of the devices that are GPUs, and known."""
    logical = tensorflow_gpus()
    models: dict[int, str] = dict(logical or [])
    found = cuda_devices(nvml, [models[index] for index in sorted(models)])
    handles: dict[str, Any] = {}
    for name in filter(gpu_name, devices):
        place = int(gpu_name(name).partition(":")[2])
        if logical:
            place = logical[place][0] if place < len(logical) else len(found)
        if place < len(found) and found[place] is not None:
            handles[name] = found[place]
        else:
            _logger.warning(
                "It is not certain which of this machine's GPUs %s is: its load, memory and clocks "
                "are unknown. Set %s=%s in the environment of all workers.",
                gpu_name(name),
                ORDER,
                FIXED_ORDER,
            )
    return handles
