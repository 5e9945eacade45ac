"""Samples of what the devices of a worker, its process and its machine are busy with."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keras_het import device_names
from keras_het.planning.diagnosis.recording import HARDWARE
from keras_het.telemetry.host_values import HostValues
from keras_het.usable_cpus import CGROUPS

Samples = np.ndarray[Any, np.dtype[np.float32]]

_NOT_SUPPORTED, _FUNCTION_NOT_FOUND = 3, 13
_LOST = (15, 16)  # NVML_ERROR_GPU_IS_LOST, NVML_ERROR_RESET_REQUIRED
_CLOCK_SM, _SENSOR_GPU = 1, 0
_NOT_LOADED = 9  # NVML_ERROR_DRIVER_NOT_LOADED
_LIBRARY_NOT_FOUND = 12
_VERSION_MISMATCH = 18
_FIXES = {
    _NOT_LOADED: "The driver is installed but not loaded: run `nvidia-smi` as root, or restart.",
    _LIBRARY_NOT_FOUND: "Install NVIDIA's driver, or start the container with its GPUs "
    "(docker run --gpus all).",
    _VERSION_MISMATCH: "The driver was updated while its old kernel module runs: restart.",
}
_logger = logging.getLogger(__name__)


class HardwareSampler:
    """Samples the hardware of one worker process; what cannot be known is NaN."""

    def __init__(
        self,
        devices: Sequence[str],
        cgroups: Path = CGROUPS,
        membership: Path | None = None,
    ) -> None:
        self.names = tuple(HARDWARE)
        self._columns = {name: column for column, name in enumerate(self.names)}
        self._host = HostValues(cgroups, membership)
        self._nvml, handles = _open_gpus(devices)
        # such as "NVIDIA A100-SXM4-40GB"; empty if unknown
        self.products = tuple(
            self._nvml.name_of(handles[name]) if self._nvml and name in handles else product
            for name, product in zip(devices, device_names.product_names(devices), strict=True)
        )
        self._gpus = [
            GpuValues(self._nvml, handles[name], device_names.gpu_name(name) or name)
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


def _open_gpus(devices: Sequence[str]) -> tuple[Nvml | None, dict[str, Any]]:
    """Open the management library if there are GPUs; return NVML's handle of each by its name."""
    if not any(map(device_names.gpu_name, devices)):
        return None, {}
    try:
        nvml = Nvml()
    except NvmlMissingError as error:
        _logger.warning("Load, memory and clocks of the GPUs are unknown. %s", error)
        return None, {}
    logical = device_names.tensorflow_gpus()
    # the first fits a GPU, the second a part of one
    asked = ([f"{kind}-{name}" for kind in ("GPU", "MIG")] for name in device_names.cuda_uuids())
    found = [[nvml.ask("DeviceGetHandleByUUID", each) for each in names] for names in asked]
    handles: dict[str, Any] = {}
    for name in filter(device_names.gpu_name, devices):
        place = device_names.cuda_index(device_names.gpu_name(name), logical)
        known = (
            [each for each in found[place] if each is not None]
            if place in range(len(found))
            else []
        )
        if known:
            handles[name] = known[0]
        else:
            _logger.warning(
                "CUDA's driver does not say which of this machine's GPUs %s is: its load, memory "
                "and clocks are unknown. See what `keras-het doctor` says.",
                device_names.gpu_name(name),
            )
    return nvml, handles


class GpuValues:
    """The part of `HARDWARE` that belongs to a GPU; of a MIG device, most is the whole GPU's."""

    def __init__(self, nvml: Nvml, device: Any, name: str) -> None:
        self._nvml = nvml
        self._device = device
        whole = nvml.ask("DeviceGetDeviceHandleFromMigDeviceHandle", device)
        self._whole = device if whole is None else whole  # of a part of a GPU
        self._name = name
        self._unsupported: set[str] = set()
        self._is_lost = False

    def read(self) -> dict[str, float]:
        """Return the values by their name in `HARDWARE`; those that are unknown are missing."""
        if self._is_lost:
            return {}
        memory = self._nvml.memory_of(self._device)
        used = self._ask("DeviceGetUtilizationRates", self._device)
        ask = self._ask_whole
        reasons = ask("DeviceGetCurrentClocksEventReasons|DeviceGetCurrentClocksThrottleReasons")
        temperature = ask("DeviceGetTemperature|DeviceGetTemperatureV", _SENSOR_GPU)
        answers = {
            "hw.gpu.utilization": (getattr(used, "gpu", None), 0.01),
            "hw.gpu.memory.usage": (getattr(memory, "used", None), 1.0),
            "hw.gpu.memory.limit": (getattr(memory, "total", None), 1.0),
            "hw.power": (ask("DeviceGetPowerUsage"), 1e-3),
            "keras_het.gpu.power_limit": (ask("DeviceGetEnforcedPowerLimit"), 1e-3),
            "hw.temperature": (temperature, 1.0),
            "keras_het.gpu.clock": (ask("DeviceGetClockInfo", _CLOCK_SM), 1e6),
            "keras_het.gpu.clock_limit": (ask("DeviceGetMaxClockInfo", _CLOCK_SM), 1e6),
            "keras_het.gpu.throttle_reasons": (reasons, 1.0),
        }
        if self._is_lost:  # meanwhile
            return {}
        return {
            name: float(answer) * factor
            for name, (answer, factor) in answers.items()
            if answer is not None
        }

    def _ask_whole(self, function: str, *arguments: Any) -> Any:
        return self._ask(function, self._whole, *arguments)

    def _ask(self, function: str, device: Any, *arguments: Any) -> Any:
        """Ask the first of some functions that there is, never again for what this GPU has not."""
        for name in function.split("|"):
            call = getattr(self._nvml.module, f"nvml{name}", None)
            if call is None or name in self._unsupported or self._is_lost:
                continue
            try:
                return call(device, *arguments)
            except self._nvml.module.NVMLError as error:
                self._note(name, error)
        return None

    def _note(self, function: str, error: Any) -> None:
        code = _code_of(error)
        if code in (_NOT_SUPPORTED, _FUNCTION_NOT_FOUND):
            self._unsupported.add(function)
        elif code in _LOST:
            self._is_lost = True
            _logger.warning(
                "%s no longer answers NVIDIA's management library (%s): its values are unknown "
                "from now on. Look for Xid errors in `dmesg`; the machine may have to restart.",
                self._name,
                error,
            )


class NvmlMissingError(RuntimeError):
    """NVIDIA's management library does not answer; the text says how to change that."""


class Nvml:
    """An open management library."""

    def __init__(self, module: Any = None) -> None:
        try:
            self.module: Any = module or importlib.import_module("pynvml")
        except ImportError as error:
            raise NvmlMissingError(
                f"NVIDIA's management library cannot be queried ({error}). Install nvidia-ml-py."
            ) from error
        try:
            self.module.nvmlInit()
        except self.module.NVMLError as error:
            fix = _FIXES.get(_code_of(error), "See what `nvidia-smi` says.")
            raise NvmlMissingError(
                f"NVIDIA's management library does not answer ({error}). {fix}"
            ) from error
        self._is_open = True

    def ask(self, function: str, *arguments: Any) -> Any:
        """Call the first of some functions of the library that answers; None if none does."""
        for name in function.split("|"):
            try:
                answer = getattr(self.module, f"nvml{name}")(*arguments)
            except (AttributeError, self.module.NVMLError):
                continue
            # older versions of `pynvml` give bytes
            return answer.decode(errors="replace") if isinstance(answer, bytes) else answer
        return None

    def gpus(self) -> list[Any]:
        """Return the handles of all GPUs in PCI bus order, those that are lost as None."""
        return [
            self.ask("DeviceGetHandleByIndex", index)
            for index in range(self.ask("DeviceGetCount") or 0)
        ]

    def parts_of(self, gpu: Any) -> list[Any]:
        """Return the handles of a GPU's MIG devices, none if it is not divided."""
        modes = self.ask("DeviceGetMigMode", gpu)
        if not modes or modes[0] != 1:
            return []
        places = range(self.ask("DeviceGetMaxMigDeviceCount", gpu) or 0)
        parts = [self.ask("DeviceGetMigDeviceHandleByIndex", gpu, place) for place in places]
        return [part for part in parts if part is not None]

    def name_of(self, device: Any) -> str:
        """Return the product's name, empty if it is hidden."""
        return str(self.ask("DeviceGetName", device) or "")

    def memory_of(self, device: Any) -> Any:
        """Return the memory of a device, with `total` and `used` in bytes; None if unknown."""
        # the older form of the question counts what the driver reserves for itself as used
        version = getattr(self.module, "nvmlMemory_v2", None)
        found = None if version is None else self.ask("DeviceGetMemoryInfo", device, version)
        return self.ask("DeviceGetMemoryInfo", device) if found is None else found

    def close(self) -> None:
        """Give the library back; a second call does nothing."""
        if self._is_open:
            self._is_open = False
            self.ask("Shutdown")


def _code_of(error: Any) -> int:
    """Return NVML's number of an error, 0 if it has none."""
    value = getattr(error, "value", 0)
    return value if isinstance(value, int) else 0
