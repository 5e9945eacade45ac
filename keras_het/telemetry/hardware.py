"""Samples of what the devices of a worker, its process and its machine are busy with."""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from keras_het import device_names
from keras_het.planning.diagnosis.recording import HARDWARE
from keras_het.usable_cpus import (
    CGROUPS,
    TASKS,
    controller_folders,
    cpu_seconds_of,
    memory_of,
    own_cpus,
    quota_of,
    statistic_of,
    times_of_thread,
)

_UNAVAILABLE = (psutil.Error, OSError, RuntimeError, ValueError, AttributeError)
"""What psutil raises where a container hides a value, or the system does not have it."""
_DEVICES = Path("/sys")


class HostValues:
    """The part of `HARDWARE` that is the same for all replicas of this process."""

    # Where a cgroup has a CPU quota or a memory limit, the tightest one bounds the machine's
    # values. Disks and network cards are those of the machine: what lies on top of them
    # (partitions, mirrors, bridges) would count the same bytes twice.

    def __init__(self, cgroups: Path = CGROUPS, membership: Path | None = None) -> None:
        self._cgroups = cgroups
        self._process = psutil.Process()
        self._cpu_groups = list(controller_folders("cpu", cgroups, membership))
        self._memory_groups = list(controller_folders("memory", cgroups, membership))
        self._disks: dict[str, bool] = {}
        self._cards: dict[str, bool] = {}
        self._last: dict[str, float] = {}
        self._waited: dict[str, float] = {}
        self._waited_in_all = 0.0

    def read(self) -> dict[str, float]:
        """Return the values by their name in `HARDWARE`; those that are unknown are missing."""
        quotas = {folder: quota_of(folder) for folder in self._cpu_groups}
        quotas = {folder: quota for folder, quota in quotas.items() if quota < math.inf}
        last, self._last = self._last, self._totals(quotas)
        rise = {
            name: total - last[name]
            for name, total in self._last.items()
            # a counter that goes back was reset, or its device removed
            if name in last and total >= last[name]
        }
        values = {
            "keras_het.cpu.budget": min([float(len(own_cpus())), *quotas.values()]),
            "process.memory.usage": _number(lambda: self._process.memory_info().rss),
            **self._memory(),
            **_rates(rise, quotas),
        }
        return {name: value for name, value in values.items() if not math.isnan(value)}

    def _totals(self, limited: Iterable[Path]) -> dict[str, float]:
        totals = {
            "seconds": time.monotonic(),
            "process.cpu": time.process_time(),
            "process.waited": _number(self._waited_for_cpus),
            "process.disk": _number(lambda: _bytes(self._process.io_counters())),
            "disk": _number(lambda: self._of_machine(_disk_counters(), self._disks, "block")),
            "network": _number(lambda: self._of_machine(_net_counters(), self._cards, "class/net")),
        }
        for folder in limited:
            totals[f"used {folder}"] = cpu_seconds_of(folder, self._cgroups)
            totals[f"stopped {folder}"] = _stopped_seconds(folder)
        times = _value(psutil.cpu_times)
        if times is not None:
            # waiting for the disk is idle; what a hypervisor took is not
            totals["idle"] = times.idle + getattr(times, "iowait", 0.0)
            # guests' time is in `user` already
            totals["all"] = sum(times) - sum(
                getattr(times, n, 0.0) for n in ("guest", "guest_nice")
            )
        return totals

    def _waited_for_cpus(self) -> float:
        """Seconds in which a thread could have run and did not, of the one that waited most."""
        # Dozens of idle threads wait a little each time they wake up: no step waits for their sum.
        waited = {}
        for path in TASKS.iterdir():
            with contextlib.suppress(OSError):  # it has ended
                waited[path.name] = times_of_thread(path.name)[1]
        rises = (now - self._waited.get(thread, 0.0) for thread, now in waited.items())
        self._waited_in_all += max(rises, default=0.0)
        self._waited = waited
        return self._waited_in_all if waited else math.nan

    def _memory(self) -> dict[str, float]:
        machine = _value(psutil.virtual_memory)
        limit = float(machine.total) if machine else math.inf
        used = float(machine.total - machine.available) if machine else math.nan
        for folder in self._memory_groups:
            bounds = memory_of(folder)
            if bounds is not None and bounds[0] < limit:
                limit, used = map(float, bounds)
        limit = limit if limit < math.inf else math.nan
        return {"system.memory.usage": used, "system.memory.limit": limit}

    def _of_machine(self, counters: Mapping[str, Any], known: dict[str, bool], kind: str) -> float:
        for name in counters.keys() - known.keys():
            known[name] = (_DEVICES / kind / name / "device").exists()
        own = [name for name in counters if known[name]]
        # in a container all devices are virtual
        chosen = own or [name for name in counters if not name.startswith(("lo", "ram"))]
        return sum(_bytes(counters[name]) for name in chosen)


def _rates(rise: Mapping[str, float], quotas: Mapping[Path, float]) -> dict[str, float]:
    seconds = rise.get("seconds", 0.0)
    if seconds <= 0:
        return {}
    if quotas:
        tightest = min(quotas, key=lambda folder: quotas[folder])
        busy = rise.get(f"used {tightest}", math.nan) / (seconds * quotas[tightest])
    else:
        busy = 1 - rise.get("idle", math.nan) / (rise.get("all") or math.nan)
    return {
        "keras_het.cpu.throttled": _throttled(rise, quotas, seconds),
        "keras_het.cpu.waiting": rise.get("process.waited", math.nan) / seconds,
        "process.cpu.usage": rise.get("process.cpu", math.nan) / seconds,
        "process.disk.io": rise.get("process.disk", math.nan) / seconds,
        "system.cpu.utilization": math.nan if math.isnan(busy) else min(max(busy, 0.0), 1.0),
        "system.disk.io": rise.get("disk", math.nan) / seconds,
        "system.network.io": rise.get("network", math.nan) / seconds,
    }


def _throttled(rise: Mapping[str, float], groups: Iterable[Path], seconds: float) -> float:
    """The part of the time in which a quota stopped the process, 0 without one."""
    parts = [0.0]
    for folder in groups:
        stopped = rise.get(f"stopped {folder}", math.nan)
        used = rise.get(f"used {folder}", math.nan)
        # The kernel adds up the times of all CPUs, both of those that ran and were then stopped.
        parts.append(min(stopped / ((stopped + used) or 1.0), stopped / seconds))
    return math.nan if any(map(math.isnan, parts)) else max(parts)


def _stopped_seconds(folder: Path) -> float:
    """Time in which a quota stopped a cgroup's threads, of all its CPUs together."""
    for name, unit in (("throttled_usec", 1e-6), ("throttled_time", 1e-9)):  # versions 2 and 1
        value = statistic_of(folder / "cpu.stat", name)
        if value is not None:
            return value * unit
    return math.nan


def _disk_counters() -> Mapping[str, Any]:
    return psutil.disk_io_counters(perdisk=True) or {}


def _net_counters() -> Mapping[str, Any]:
    return psutil.net_io_counters(pernic=True) or {}


def _bytes(counters: Any) -> float:
    if hasattr(counters, "bytes_sent"):
        return float(counters.bytes_sent + counters.bytes_recv)
    return float(counters.read_bytes + counters.write_bytes)


def _value(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except _UNAVAILABLE:
        return None


def _number(read: Callable[[], float]) -> float:
    value = _value(read)
    return math.nan if value is None else float(value)


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

    def __init__(self, nvml: Nvml, device: object, name: str) -> None:
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

    def _ask_whole(self, function: str, *arguments: object) -> Any:
        return self._ask(function, self._whole, *arguments)

    def _ask(self, function: str, device: object, *arguments: object) -> Any:
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

    def _note(self, function: str, error: Exception) -> None:
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

    def ask(self, function: str, *arguments: object) -> Any:
        """Call the first of some functions of the library that answers; None if none does."""
        for name in function.split("|"):
            try:
                answer = getattr(self.module, f"nvml{name}")(*arguments)
            except (AttributeError, self.module.NVMLError):
                continue
            # older versions of `pynvml` give bytes
            return answer.decode(errors="replace") if isinstance(answer, bytes) else answer
        return None

    def gpus(self) -> list[object]:
        """Return the handles of all GPUs in PCI bus order, those that are lost as None."""
        return [
            self.ask("DeviceGetHandleByIndex", index)
            for index in range(self.ask("DeviceGetCount") or 0)
        ]

    def parts_of(self, gpu: object) -> list[object]:
        """Return the handles of a GPU's MIG devices, none if it is not divided."""
        modes = self.ask("DeviceGetMigMode", gpu)
        if not modes or modes[0] != 1:
            return []
        places = range(self.ask("DeviceGetMaxMigDeviceCount", gpu) or 0)
        parts = [self.ask("DeviceGetMigDeviceHandleByIndex", gpu, place) for place in places]
        return [part for part in parts if part is not None]

    def name_of(self, device: object) -> str:
        """Return the product's name, empty if it is hidden."""
        return str(self.ask("DeviceGetName", device) or "")

    def memory_of(self, device: object) -> Any:
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


def _code_of(error: Exception) -> int:
    """Return NVML's number of an error, 0 if it has none."""
    value = getattr(error, "value", 0)
    return value if isinstance(value, int) else 0
