"""NVIDIA's management library, asked in ways that any driver version answers."""

from __future__ import annotations

import importlib
import math
from typing import Any

_NOT_LOADED = 9  # NVML_ERROR_DRIVER_NOT_LOADED
_LIBRARY_NOT_FOUND = 12
_VERSION_MISMATCH = 18
_FIXES = {
    _NOT_LOADED: "The driver is installed but not loaded: run `nvidia-smi` as root, or restart.",
    _LIBRARY_NOT_FOUND: "Install NVIDIA's driver, or start the container with its GPUs "
    "(docker run --gpus all).",
    _VERSION_MISMATCH: "The driver was updated while its old kernel module runs: restart.",
}


class NvmlMissingError(RuntimeError):
    """NVIDIA's management library does not answer; the text says how to change that."""


class Nvml:
    """An open management library."""

    def __init__(self, module: Any = None) -> None:
        try:
            self.module: Any = module or importlib.import_module("pynvml")
        except ImportError as error:
            raise NvmlMissingError(
                f"NVIDIA's management library cannot be asked ({error}). Install nvidia-ml-py."
            ) from error
        try:
            self.module.nvmlInit()
        except self.module.NVMLError as error:
            fix = _FIXES.get(code_of(error), "See what `nvidia-smi` says.")
            raise NvmlMissingError(
                f"NVIDIA's management library does not answer ({error}). {fix}"
            ) from error
        self._is_open = True

    def ask(self, function: str, *arguments: Any) -> Any:
        """Call a function of the library; None if it gives no answer."""
        for name in function.split("|"):
            try:
                return text_of(getattr(self.module, f"nvml{name}")(*arguments))
            except (AttributeError, self.module.NVMLError):
                continue
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

    def whole_of(self, device: Any) -> Any:
        """Return the handle of the GPU that a MIG device is a part of, else the handle itself."""
        whole = self.ask("DeviceGetDeviceHandleFromMigDeviceHandle", device)
        return device if whole is None else whole

    def name_of(self, device: Any) -> str:
        """Return the product's name, empty if it is hidden."""
        return str(self.ask("DeviceGetName", device) or "")

    def memory_of(self, device: Any) -> Any:
        """Return the memory of a device, with `total` and `used` in bytes; None if unknown.

        The older form of the question counts what the driver reserves for itself as used.
        """
        version = getattr(self.module, "nvmlMemory_v2", None)
        found = None if version is None else self.ask("DeviceGetMemoryInfo", device, version)
        return self.ask("DeviceGetMemoryInfo", device) if found is None else found

    def close(self) -> None:
        """Give the library back; a second call does nothing."""
        if self._is_open:
            self._is_open = False
            self.ask("Shutdown")


def code_of(error: Any) -> int:
    """Return NVML's number of an error, 0 if it has none."""
    value = getattr(error, "value", 0)
    return value if isinstance(value, int) else 0


def text_of(answer: Any) -> Any:
    """Return bytes, which older versions of `pynvml` give, as text, and all else as it is."""
    return answer.decode(errors="replace") if isinstance(answer, bytes) else answer


def number_of(answer: Any, factor: float = 1.0) -> float:
    """Return an answer in another unit, NaN if there is none."""
    return math.nan if answer is None else float(answer) * factor
