"""What is on this machine, gathered once, and what a check may find in it."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import importlib.util
import ipaddress
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from keras_het.device_names import processor_name
from keras_het.launch.doctor.tensorflow_facts import TensorFlowFacts, ask_tensorflow
from keras_het.strategy.cluster.cluster_config import ClusterConfig, read_cluster_config
from keras_het.telemetry.hardware import HostValues, Nvml, NvmlMissingError
from keras_het.usable_cpus import own_cpus, usable_cpus

_INTERNET = (socket.AF_INET, socket.AF_INET6)


HOW_TO_CLOSE = (
    "Block their ports with a firewall, or start them in their own network namespace "
    "(keras-het run --help)."
)


def public_addresses() -> tuple[str, ...]:
    found = [each for interface in psutil.net_if_addrs().values() for each in interface]
    texts = [each.address.partition("%")[0] for each in found if each.family in _INTERNET]
    return tuple(text for text in texts if ipaddress.ip_address(text).is_global)


def open_to(public: Sequence[str]) -> str:
    return (
        "TensorFlow's servers listen on every interface of this machine, also on "
        f"{', '.join(public)}. Anyone who can reach a worker's port can read and write files."
    )


OK, NOTE, WARNING, FAULT = "ok", "note", "warning", "fault"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that is right or wrong; without a text there is nothing to say."""

    level: str
    check: str
    text: str
    fix: str = ""
    section: str = ""


# right; good to know; makes training slower than it could be; makes it fail
ok, note, warning, fault = (
    functools.partial(Finding, level) for level in (OK, NOTE, WARNING, FAULT)
)


def expect(
    check: str, holds: bool, text: str, otherwise: str, fix: str, level: str = WARNING
) -> Finding:
    """Return a row of the table of checks; `otherwise` and the fix belong to what does not hold."""
    return ok(check, text) if holds else Finding(level, check, f"{text} {otherwise}".strip(), fix)


def unless(check: str, holds: bool, text: str, fix: str, level: str = WARNING) -> Finding:
    """Return a row of which nothing is said where it holds."""
    return expect(check, holds, "", text, fix, level)


_PCI = Path("/sys/bus/pci/devices")
_NVIDIA, _DISPLAY_CLASSES = "0x10de", ("0x0300", "0x0302")
EXTRAS = {
    "tensorboard": "tensorboard",
    "prometheus": "prometheus-client",
    "data-validation": "tensorflow-data-validation",
    "ray": "ray",
    "recipes": "matplotlib",
}
"""A package that each extra of keras_het brings."""


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU as NVIDIA's driver sees it, whether or not TensorFlow does."""

    index: int
    name: str
    uuid: str = ""
    capability: tuple[int, int] = (0, 0)
    memory_bytes: int = 0
    used_bytes: int = 0
    parts: int = 0


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is known of a machine and of this process's place in a cluster."""

    environ: Mapping[str, str] = dataclasses.field(default_factory=dict)
    host: str = ""
    processor: str = ""
    affinity: int = 1
    cpus: float = 1.0
    memory_limit: float = 0.0
    memory_used: float = 0.0
    gpus: tuple[Gpu, ...] = ()
    gpu_boards: int = 0
    driver: str = ""
    driver_cuda: tuple[int, int] = (0, 0)
    nvml_problem: str = ""
    tensorflow: TensorFlowFacts = dataclasses.field(default_factory=TensorFlowFacts)
    cluster: ClusterConfig | None = None
    cluster_problem: str = ""
    extras: Mapping[str, str] = dataclasses.field(default_factory=dict)
    has_pkg_resources: bool = True
    log_dir: Path | None = None
    public_addresses: tuple[str, ...] = ()


def gather(log_dir: Path | None = None) -> Facts:
    """Look at this machine; nothing is changed, and TensorFlow runs in another process."""
    environ = dict(os.environ)
    cluster, problem = None, ""
    try:
        cluster = read_cluster_config(environ)
    except ValueError as error:
        problem = str(error)
    # before TensorFlow takes memory of the GPUs
    listed = list_gpus()
    host = HostValues().read()
    return Facts(
        environ=environ,
        public_addresses=public_addresses(),
        host=socket.gethostname(),
        processor=processor_name(),
        affinity=len(own_cpus()),
        cpus=usable_cpus(),
        memory_limit=host.get("system.memory.limit", 0.0),
        memory_used=host.get("system.memory.usage", 0.0),
        gpu_boards=count_gpu_boards(),
        tensorflow=ask_tensorflow(environ),
        cluster=cluster,
        cluster_problem=problem,
        extras={extra: _version(package) for extra, package in EXTRAS.items()},
        has_pkg_resources=importlib.util.find_spec("pkg_resources") is not None,
        log_dir=log_dir,
        **listed,
    )


def list_gpus() -> dict[str, Any]:
    try:
        nvml = Nvml()
    except NvmlMissingError as error:
        return {"nvml_problem": str(error)}
    version = nvml.ask("SystemGetCudaDriverVersion_v2|SystemGetCudaDriverVersion") or 0
    handles = enumerate(nvml.gpus())
    found = {
        "gpus": tuple(_gpu(nvml, index, handle) for index, handle in handles if handle),
        "driver": str(nvml.ask("SystemGetDriverVersion") or ""),
        "driver_cuda": (version // 1000, version % 1000 // 10),
    }
    nvml.close()
    return found


def count_gpu_boards(pci: Path = _PCI) -> int:
    """Return how many graphics boards of NVIDIA are in this machine, with or without a driver."""
    count = 0
    for device in pci.glob("*"):
        try:
            vendor = (device / "vendor").read_text().strip()
            kind = (device / "class").read_text().strip()
        except OSError:
            continue
        count += vendor == _NVIDIA and kind.startswith(_DISPLAY_CLASSES)
    return count


def _gpu(nvml: Nvml, index: int, handle: object) -> Gpu:
    memory = nvml.memory_of(handle)
    capability = nvml.ask("DeviceGetCudaComputeCapability", handle) or (0, 0)
    return Gpu(
        index,
        nvml.name_of(handle),
        str(nvml.ask("DeviceGetUUID", handle) or ""),
        (int(capability[0]), int(capability[1])),
        int(getattr(memory, "total", 0)),
        int(getattr(memory, "used", 0)),
        len(nvml.parts_of(handle)),
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
