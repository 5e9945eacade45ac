"""A `pynvml` for GPUs that are not there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

NOT_SUPPORTED, DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND, FUNCTION_NOT_FOUND, LOST = 3, 9, 12, 13, 15


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


class Gpu:
    """A GPU, or a part of one (`whole`); `errors` by the name of a query."""

    def __init__(
        self,
        name: str = "NVIDIA A100-SXM4-40GB",
        uuid: str = "GPU-a",
        parts: tuple[Gpu, ...] = (),
        errors: dict[str, int] | None = None,
        capability: tuple[int, int] = (8, 0),
    ) -> None:
        self.name, self.uuid, self.parts, self.errors = name, uuid, parts, errors or {}
        self.capability = capability
        self.whole: Gpu | None = None
        self.asked: list[str] = []
        for part in parts:
            part.whole = self


class FakeNvml:
    """The module: what a driver would answer about `gpus`, or the error that `nvmlInit` raises."""

    NVMLError = NVMLError
    NVML_CLOCK_SM = 1
    nvmlMemory_v2 = 0x02000028  # noqa: N815

    def __init__(
        self,
        *gpus: Gpu,
        init_error: int = 0,
        old: bool = False,
    ) -> None:
        self.gpus, self.init_error, self.old = gpus, init_error, old
        self.opened = 0

    def nvmlInit(self) -> None:  # noqa: N802
        if self.init_error:
            raise NVMLError(self.init_error)
        self.opened += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.opened -= 1

    def __getattr__(self, name: str) -> Any:
        answers = {
            "SystemGetDriverVersion": lambda: "550.54.14",
            "SystemGetCudaDriverVersion": lambda: 12040,
            "DeviceGetCount": lambda: len(self.gpus),
            "DeviceGetHandleByIndex": self._by_index,
            "DeviceGetHandleByUUID": self._by_uuid,
            "DeviceGetMigMode": lambda gpu: self._mig(gpu),
            "DeviceGetMaxMigDeviceCount": lambda gpu: 7,
            "DeviceGetMigDeviceHandleByIndex": self._part,
            "DeviceGetDeviceHandleFromMigDeviceHandle": self._whole,
            "DeviceGetName": lambda gpu: gpu.name.encode() if self.old else gpu.name,
            "DeviceGetUUID": lambda gpu: gpu.uuid,
            "DeviceGetCudaComputeCapability": lambda gpu: gpu.capability,
            "DeviceGetMemoryInfo": self._memory,
            "DeviceGetUtilizationRates": self._utilization,
            "DeviceGetPowerUsage": lambda gpu: 123_000,
            "DeviceGetEnforcedPowerLimit": lambda gpu: 400_000,
            "DeviceGetTemperature": lambda gpu, sensor: 61,
            "DeviceGetClockInfo": lambda gpu, kind: 1095,
            "DeviceGetMaxClockInfo": lambda gpu, kind: 1410,
            "DeviceGetCurrentClocksEventReasons": lambda gpu: 0x4,
        }
        if self.old:
            answers["DeviceGetCurrentClocksThrottleReasons"] = answers.pop(
                "DeviceGetCurrentClocksEventReasons"
            )
        query = name.removeprefix("nvml")
        if query not in answers:
            raise AttributeError(name)

        def ask(*arguments: Any) -> Any:
            gpu = arguments[0] if arguments and isinstance(arguments[0], Gpu) else None
            if gpu:
                gpu.asked.append(query)
                if error := gpu.errors.get(query) or gpu.errors.get("all"):
                    raise NVMLError(error)
            return answers[query](*arguments)

        return ask

    def _memory(self, gpu: Gpu, version: int | None = None) -> SimpleNamespace:
        """Of the total, 600 MB are the driver's; the old form counts them as used."""
        if version is not None and (self.old or version != self.nvmlMemory_v2):
            raise NVMLError(3)
        reserved = 0 if version else 600 * 2**20
        total = (5 if gpu.whole else 40) * 2**30
        return SimpleNamespace(total=total, used=2**30 + reserved)

    def _by_index(self, index: int) -> Gpu:
        return self.gpus[index]

    def _by_uuid(self, uuid: str) -> Gpu:
        devices = [*self.gpus, *(part for gpu in self.gpus for part in gpu.parts)]
        for device in devices:
            if device.uuid == uuid:
                return device
        raise NVMLError(6)

    def _mig(self, gpu: Gpu) -> tuple[int, int]:
        if gpu.whole:
            raise NVMLError(2)
        return (1, 1) if gpu.parts else (0, 0)

    def _part(self, gpu: Gpu, index: int) -> Gpu:
        if index >= len(gpu.parts):
            raise NVMLError(6)
        return gpu.parts[index]

    def _whole(self, device: Gpu) -> Gpu:
        if device.whole is None:
            raise NVMLError(2)
        return device.whole

    def _utilization(self, gpu: Gpu) -> Any:
        if gpu.whole or gpu.parts:
            raise NVMLError(NOT_SUPPORTED)
        return SimpleNamespace(gpu=73, memory=12)
