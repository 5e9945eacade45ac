"""What NVML says about one GPU."""

from __future__ import annotations

import logging
import math
from typing import Any

from keras_het.telemetry.nvml import Nvml, code_of, number_of

_NOT_SUPPORTED, _FUNCTION_NOT_FOUND = 3, 13
_LOST = (15, 16)  # NVML_ERROR_GPU_IS_LOST, NVML_ERROR_RESET_REQUIRED
_CLOCK_SM, _SENSOR_GPU = 1, 0

_logger = logging.getLogger("keras_het")


class GpuValues:
    """The part of `HARDWARE` that belongs to a GPU.

    Power, temperature, clocks and their limits of a MIG device are those of the whole GPU; its
    utilization is unknown, because NVML does not measure it.
    """

    def __init__(self, nvml: Nvml, device: Any, name: str) -> None:
        self._nvml = nvml
        self._device = device
        self._whole = nvml.whole_of(device)
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
        values = {
            "hw.gpu.utilization": number_of(getattr(used, "gpu", None), 0.01),
            "hw.gpu.memory.usage": number_of(getattr(memory, "used", None)),
            "hw.gpu.memory.limit": number_of(getattr(memory, "total", None)),
            "hw.power": number_of(ask("DeviceGetPowerUsage"), 1e-3),
            "keras_het.gpu.power_limit": number_of(ask("DeviceGetEnforcedPowerLimit"), 1e-3),
            "hw.temperature": number_of(temperature),
            "keras_het.gpu.clock": number_of(ask("DeviceGetClockInfo", _CLOCK_SM), 1e6),
            "keras_het.gpu.clock_limit": number_of(ask("DeviceGetMaxClockInfo", _CLOCK_SM), 1e6),
            "keras_het.gpu.throttle_reasons": number_of(reasons),
        }
        if self._is_lost:  # meanwhile
            return {}
        return {name: value for name, value in values.items() if not math.isnan(value)}

    def _ask_whole(self, function: str, *arguments: Any) -> Any:
        return self._ask(function, self._whole, *arguments)

    def _ask(self, function: str, device: Any, *arguments: Any) -> Any:
        """Ask as `Nvml.ask` does, and never again for what this GPU does not have."""
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
        code = code_of(error)
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
