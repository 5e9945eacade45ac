"""Checks of a machine: packages of Python, GPUs, CPUs, memory, and room on disks."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from keras_het import __version__
from keras_het.launch.doctor.cluster_checks import num_tasks_here
from keras_het.launch.doctor.facts import (
    FAULT,
    HOW_TO_CLOSE,
    Facts,
    Finding,
    Gpu,
    expect,
    fault,
    note,
    ok,
    open_to,
    unless,
    warning,
)
from keras_het.launch.local.worker_environment import KERAS_HET_EMULATED_DEVICES, VISIBLE
from keras_het.seen_versions import FIRST_UNSEEN, KERAS_BACKEND, NEEDED_BACKEND

_OLDEST = {"Keras": (3, 14), "TensorFlow": (2, 16)}
_TENSORBOARD_WITHOUT_IT = (2, 21)
SHARED_MEMORY = Path("/dev/shm")
_LEAST_CPUS_PER_GPU = 2.0
_LEAST_MEMORY = 2 * 2**30
_LEAST_SHARED_MEMORY = 256 * 2**20
_LEAST_ROOM = 2**30
_THREADS = "TF_NUM_INTRAOP_THREADS"


def software(facts: Facts) -> Iterator[Finding]:
    found = facts.tensorflow
    built = f"for CUDA {found.cuda} and cuDNN {found.cudnn}" if found.cuda else "without CUDA"
    product = f"keras_het {__version__}, TensorFlow {found.tensorflow} (built {built})"
    yield (
        fault("tensorflow_import", found.problem, found.fix)
        if found.problem
        else ok("tensorflow_import", f"{product}, Keras {found.keras}.")
    )
    for name, version in (("TensorFlow", found.tensorflow), ("Keras", found.keras)):
        oldest, unseen = (".".join(map(str, bounds[name])) for bounds in (_OLDEST, FIRST_UNSEEN))
        expected = f"Received: {name} {version}; expected: from {oldest} to below {unseen}."
        yield unless(
            "versions",
            not version or _numbers(version) >= _OLDEST[name],
            f"{name} is too old. {expected}",
            "pip install --upgrade . in the checkout of keras_het",
            FAULT,
        )
        yield unless(
            "versions",
            _numbers(version) < FIRST_UNSEEN[name],
            f"keras_het has not been tested with this version. {expected}",
            f"If training fails, or its numbers differ: pip install '{name.lower()}<{unseen}'",
        )
    backend, place = _chosen_backend(facts)
    yield expect(
        "keras_backend",
        backend == NEEDED_BACKEND,
        f"Backend of Keras: {backend!r} ({place}).",
        f"keras_het needs the TensorFlow backend. Expected: {NEEDED_BACKEND!r}.",
        f"Set {KERAS_BACKEND}={NEEDED_BACKEND} in the environment of all workers, before keras is "
        "imported; it wins over keras.json.",
        FAULT,
    )
    board = facts.extras.get("tensorboard", "")
    yield unless(
        "extras",
        facts.has_pkg_resources or not board or _numbers(board) >= _TENSORBOARD_WITHOUT_IT,
        f"TensorBoard {board} cannot start: it imports pkg_resources, which the installed "
        "setuptools no longer provides.",
        "pip install 'setuptools<82'",
    )
    installed = [f"{extra} {version}" for extra, version in facts.extras.items() if version]
    missing = [extra for extra, version in facts.extras.items() if not version]
    yield note(
        "extras",
        f"Extras installed: {', '.join(installed) or 'none'}; not: {', '.join(missing)}.",
        "pip install '.[NAME]' in the checkout of keras_het installs one." if missing else "",
    )
    yield unless(
        "emulation",
        not facts.environ.get(KERAS_HET_EMULATED_DEVICES),
        f"{KERAS_HET_EMULATED_DEVICES} is set: this process's devices wait, to emulate others.",
        "Unset it to train at full speed; keras-het run --emulate-speeds sets it where it belongs.",
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def _chosen_backend(facts: Facts) -> tuple[str, str]:
    given = facts.environ.get(KERAS_BACKEND)
    if given:
        return given, KERAS_BACKEND
    home = facts.environ.get("KERAS_HOME") or Path(facts.environ.get("HOME") or "~") / ".keras"
    path = Path(os.path.expanduser(home)) / "keras.json"  # noqa: PTH111 - a text or a path
    try:
        chosen = json.loads(path.read_text()).get("backend")
    except (OSError, ValueError, AttributeError):
        chosen = None
    return (str(chosen), str(path)) if chosen else (NEEDED_BACKEND, "the default")


def machine(facts: Facts) -> Iterator[Finding]:
    has_quota = facts.cpus < facts.affinity
    here = num_tasks_here(facts.cluster)
    each, num_gpus = facts.cpus / here, facts.tensorflow.replicas
    quota = f", of which a cgroup's quota leaves {facts.cpus:g}" if has_quota else ""
    whose = f"for each of {here} tasks on this machine" if here > 1 else "for this worker"
    yield expect(
        "cpu_budget",
        each >= _LEAST_CPUS_PER_GPU * num_gpus,
        f"CPUs: {facts.affinity}{quota}; {each:g} {whose}.",
        f"They feed {num_gpus} GPUs: the input may not keep up. Expected: {_LEAST_CPUS_PER_GPU:g} "
        "or more for each GPU.",
        "Give this process more CPUs, or prepare data on other machines (tf.data service).",
    )
    given = facts.environ.get(_THREADS, "")
    threads = int(given) if given.isdecimal() and int(given) else facts.affinity
    yield unless(
        "cpu_quota",
        not has_quota or threads <= 2 * facts.cpus,
        f"A cgroup's quota lets {facts.cpus:g} CPUs run, and TensorFlow starts {threads} "
        "threads for its operations: the kernel stops all of them for a part of each period, "
        "also those that read the input and answer other workers.",
        f"Set {_THREADS}={max(1, int(facts.cpus))} and TF_NUM_INTEROP_THREADS="
        f"{max(2, int(facts.cpus))}, or raise the quota (docker run --cpus, Kubernetes "
        "resources.limits.cpu).",
    )
    left = facts.memory_limit - facts.memory_used
    if facts.memory_limit:
        yield expect(
            "memory",
            left >= _LEAST_MEMORY,
            f"Memory: {left / 2**30:.1f} of {facts.memory_limit / 2**30:.1f} GiB are free.",
            f"TensorFlow and a small model need {_LEAST_MEMORY / 2**30:g} GiB.",
            "End other programs, or raise the limit of the cgroup (docker run --memory).",
        )
    if len(facts.gpus) > 1 and SHARED_MEMORY.is_dir():
        room = shutil.disk_usage(SHARED_MEMORY).free
        yield unless(
            "shared_memory",
            room >= _LEAST_SHARED_MEMORY,
            f"{SHARED_MEMORY} has room for {room / 2**20:.0f} MiB, and NCCL sums {len(facts.gpus)} "
            f"GPUs through it. Expected: {_LEAST_SHARED_MEMORY // 2**20} MiB or more.",
            "Start the container with --shm-size=1g or --ipc=host (Kubernetes: an emptyDir of "
            "medium Memory).",
        )
    if facts.log_dir is not None:
        yield _room("The folder for logs", facts.log_dir, "--log-dir")
    yield _room("The folder for temporary files", Path(tempfile.gettempdir()), "TMPDIR")
    public = facts.public_addresses
    yield unless("public_address", not public, open_to(public), HOW_TO_CLOSE)


def _room(name: str, folder: Path, setting: str) -> Finding:
    parents = folder.absolute(), *folder.absolute().parents
    existing = next(path for path in parents if path.exists())
    room = shutil.disk_usage(existing).free
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return fault(
            "room_for_logs",
            f"{name} cannot be written. Received: {folder}; {existing} is not a folder that this "
            "user may write to.",
            f"Give another one ({setting}), or change its owner.",
        )
    return expect(
        "room_for_logs",
        room >= _LEAST_ROOM,
        f"{name}, {folder}, has room for {room / 2**30:.1f} GiB.",
        f"Expected: {_LEAST_ROOM / 2**30:g} GiB or more for logs and backups.",
        f"Free some space, or give another one ({setting}).",
    )


_USED_PART = 0.1
_CUDA_BUILD = (
    "pip install '.[cuda]' in the checkout of keras_het (tensorflow-cpu has to be uninstalled "
    "first)"
)
_TENSOR_FLOAT_32 = (8, 0)
"""Least capability with TensorFloat-32."""
WITHOUT_TENSOR_FLOAT_32 = (
    "Put tf.config.experimental.enable_tensor_float_32_execution(False) at the script's start: all "
    "then multiply in float32, those that have it more slowly."
)


def gpus(facts: Facts) -> Iterator[Finding]:
    found = facts.tensorflow
    yield _driver(facts)
    yield unless(
        "tensorflow_build",
        bool(found.cuda or not found.tensorflow or not (facts.gpus or facts.gpu_boards)),
        "This machine has NVIDIA GPUs, and this build of TensorFlow knows no CUDA: training "
        "runs on the CPU, and not in one group with workers that have GPUs.",
        _CUDA_BUILD,
    )
    text = facts.environ.get(VISIBLE)
    shown = len(facts.gpus) if text is None else _shown(text, facts.gpus)
    if text is not None and facts.gpus:
        yield expect(
            "hidden_gpus",
            shown == len(text.split(",")),
            f"{VISIBLE}={text!r} lets this process see {shown} of {len(facts.gpus)} GPUs.",
            "CUDA hides a wrong entry and every entry after it. Expected: indices from 0 to "
            f"{len(facts.gpus) - 1}, or UUIDs (`nvidia-smi -L`), with commas between them.",
            f"Unset {VISIBLE}, or list the GPUs that this worker may use.",
        )
    for gpu in facts.gpus:
        yield from _card(facts, gpu)
    if len(have_tensor_float_32(facts)) > 1:
        known = [gpu for gpu in facts.gpus if gpu.capability[0]]
        without, having = (
            ", ".join(
                f"{gpu.index} ({gpu.name})"
                for gpu in known
                if (gpu.capability >= _TENSOR_FLOAT_32) is has_it
            )
            for has_it in (False, True)
        )
        yield note(
            "tensor_float_32",
            f"TensorFlow multiplies float32 in TensorFloat-32 by default on GPU {having}, and not "
            f"on GPU {without}, which does not have it: products differ by about 1e-3.",
            WITHOUT_TENSOR_FLOAT_32,
        )
    if found.cuda and shown:
        listed = f": {', '.join(found.gpus)}" if found.gpus else ", and lists none"
        yield expect(
            "used_gpus",
            0 < len(found.gpus) <= found.replicas,
            f"TensorFlow uses {found.replicas} of {shown} GPUs that it may{listed}.",
            f"TensorFlow says: {_last(found.log)}" if found.log else "",
            "It leaves out GPUs that are old, or that have few multiprocessors "
            "(TF_MIN_GPU_MULTIPROCESSOR_COUNT, 8 by default)."
            if found.gpus
            else f"Install the libraries of CUDA {found.cuda}, for which it was built, with pip "
            f"install 'tensorflow[and-cuda]=={found.tensorflow}', and a driver (of the machine, "
            "where this is a container) that is not older than them.",
        )
    names = {gpu.name for gpu in facts.gpus}
    if len(names) > 1 and facts.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        yield note(
            "gpu_order",
            f"With GPUs that differ ({', '.join(sorted(names))}) CUDA counts fast ones first, and "
            "nvidia-smi by their place on the bus.",
            "CUDA_DEVICE_ORDER=PCI_BUS_ID makes both count alike.",
        )


def _driver(facts: Facts) -> Finding:
    found = facts.tensorflow
    if facts.driver or facts.gpus:
        newest = ".".join(map(str, facts.driver_cuda))
        limit = f", for CUDA up to {newest}" if facts.driver_cuda[0] else ""
        built = f"; TensorFlow is built for CUDA {found.cuda}" if found.cuda else ""
        text = f"NVIDIA's driver {facts.driver} answers (NVML){limit}{built}"
        return ok("driver", f"{text}; GPUs: {len(facts.gpus)}.")
    if facts.gpu_boards:
        return warning(
            "driver",
            f"This machine has {facts.gpu_boards} NVIDIA GPUs, and no driver that answers: "
            "training runs on the CPU.",
            facts.nvml_problem or "Install NVIDIA's driver.",
        )
    why = facts.nvml_problem if found.cuda else ""
    return note("driver", "This machine has no GPU: training runs on the CPU.", why)


def _card(facts: Facts, gpu: Gpu) -> Iterator[Finding]:
    found, memory = facts.tensorflow, gpu.memory_bytes / 2**30
    capability = ".".join(map(str, gpu.capability)) if gpu.capability[0] else "unknown"
    parts = f", divided into {gpu.parts} parts (MIG)" if gpu.parts else ""
    name = f"GPU {gpu.index}: {gpu.name}"
    yield ok("cards", f"{name}, compute capability {capability}, {memory:.0f} GiB{parts}.")
    yield unless(
        "kernels",
        not gpu.capability[0] or not found.kernels or _has_binary(gpu.capability, found.kernels),
        f"TensorFlow {found.tensorflow} has no kernels for GPU {gpu.index} ({gpu.name}). Received: "
        f"compute capability {capability}; it is built for {', '.join(found.kernels)}. It leaves "
        "out a GPU that is older, and compiles them for a newer one at its first step, which takes "
        "minutes, up to half an hour, or fails (CUDA_ERROR_INVALID_PTX).",
        "Install a TensorFlow that is built for it, or NVIDIA's container "
        f"(nvcr.io/nvidia/tensorflow), or leave the GPU out of {VISIBLE}. If the wait is the only "
        "problem, CUDA_CACHE_MAXSIZE=4294967296 keeps the result.",
    )
    yield unless(
        "gpus_in_use",
        gpu.used_bytes <= _USED_PART * gpu.memory_bytes,
        f"Others use {gpu.used_bytes / 2**30:.1f} of {memory:.0f} GiB of GPU {gpu.index} "
        f"({gpu.name}); TensorFlow takes all that is left.",
        f"`nvidia-smi` names the processes. End them, or choose other GPUs with {VISIBLE}.",
    )


def have_tensor_float_32(facts: Facts) -> list[bool]:
    """Return whether the cards that train here have it; both values where they differ."""
    known = {gpu.capability >= _TENSOR_FLOAT_32 for gpu in facts.gpus if gpu.capability[0]}
    return sorted(known) if facts.tensorflow.replicas else []


def _shown(text: str, gpus: Sequence[Gpu]) -> int:
    """Number of devices that CUDA_VISIBLE_DEVICES shows; nothing counts behind a wrong entry."""
    entries = [entry.strip() for entry in text.split(",")]
    for place, entry in enumerate(entries):
        is_index = entry.isdecimal() and int(entry) < len(gpus)
        named = [gpu for gpu in gpus if entry.startswith("GPU-") and gpu.uuid.startswith(entry)]
        is_part = entry.startswith("MIG-") and any(gpu.parts for gpu in gpus)
        if not (is_index or len(named) == 1 or is_part):
            return place
    return len(entries)


def _has_binary(capability: tuple[int, int], kernels: Sequence[str]) -> bool:
    """Machine code, of "sm_80" or "compute_90", runs on GPUs of its major that are not older."""
    built = [int((re.findall(r"\d+", name) or ["0"])[0]) for name in kernels]
    major, minor = capability
    return any(each // 10 == major and each % 10 <= minor for each in built)


def _last(log: str) -> str:
    lines = log.splitlines()
    telling = [line for line in lines if re.search(r"dlopen|[Ii]gnoring|no kernel", line)]
    return (telling or lines)[-1]
