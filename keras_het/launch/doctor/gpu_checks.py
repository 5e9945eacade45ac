"""Checks of GPUs: what the driver has, and what TensorFlow makes of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from keras_het.launch.doctor.facts import Facts, Finding, Gpu, note, ok, warning

VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER, FIXED_ORDER = "CUDA_DEVICE_ORDER", "PCI_BUS_ID"
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
_TOO_NEW = 12
"""Capability for which kernels that TensorFlow compiles at its start are known to fail."""


def driver(facts: Facts) -> Iterator[Finding]:
    found = facts.tensorflow
    if facts.driver or facts.gpus:
        newest = ".".join(map(str, facts.driver_cuda))
        limit = f", for CUDA up to {newest}" if facts.driver_cuda[0] else ""
        built = f"; TensorFlow is built for CUDA {found.cuda}" if found and found.cuda else ""
        yield ok(
            f"NVIDIA's driver {facts.driver} answers (NVML){limit}{built}; GPUs: {len(facts.gpus)}."
        )
    elif facts.gpu_boards:
        yield warning(
            f"This machine has {facts.gpu_boards} NVIDIA GPUs, and no driver that answers: "
            "training runs on the CPU.",
            facts.nvml_problem or "Install NVIDIA's driver.",
        )
    elif found is not None and found.cuda:
        yield note(
            "TensorFlow is built for CUDA, and this machine has no GPU: training runs on the CPU.",
            facts.nvml_problem,
        )
    else:
        yield note("No GPU: training runs on the CPU.")


def driver_age(facts: Facts) -> Iterator[Finding]:
    found = facts.tensorflow
    major = facts.driver_cuda[0]
    if found is None or not found.cuda or not major:
        return
    # within a major version older drivers run newer libraries
    if major < int(found.cuda.partition(".")[0]):
        yield warning(
            f"NVIDIA's driver is too old for this build of TensorFlow, which then uses no GPU. "
            f"Received: driver {facts.driver}, for CUDA up to {major}.{facts.driver_cuda[1]}; "
            f"expected: one for CUDA {found.cuda}.",
            "Update the driver (of the machine, where this is a container), or install an older "
            "TensorFlow.",
        )


def tensorflow_build(facts: Facts) -> Iterator[Finding]:
    found = facts.tensorflow
    has_gpus = bool(facts.gpus or facts.gpu_boards)
    if has_gpus and found is not None and not found.problem and not found.cuda:
        yield warning(
            "This machine has NVIDIA GPUs, and this build of TensorFlow knows no CUDA: training "
            "runs on the CPU, and not in one group with workers that have GPUs.",
            _CUDA_BUILD,
        )


def hidden_gpus(facts: Facts) -> Iterator[Finding]:
    text = facts.environ.get(VISIBLE)
    if text is None or not facts.gpus:
        return
    shown = _shown(text, facts.gpus)
    entries = [entry.strip() for entry in text.split(",")]
    if shown == 0:
        yield warning(
            f"{VISIBLE} hides all GPUs. Received: {text!r}; expected: indices from 0 to "
            f"{len(facts.gpus) - 1}, or UUIDs (`nvidia-smi -L`), with commas between them.",
            f"Unset {VISIBLE}, or list the GPUs that this worker may use.",
        )
    elif shown < len(entries):
        yield warning(
            f"{VISIBLE} has a wrong entry, and CUDA hides what comes behind it. Received: "
            f"{text!r}, of which it takes the first {shown}.",
            "Remove the entry; `nvidia-smi -L` lists the GPUs.",
        )
    elif shown < len(facts.gpus):
        yield note(f"{VISIBLE}={text} lets this process see {shown} of {len(facts.gpus)} GPUs.")


def cards(facts: Facts) -> Iterator[Finding]:
    for gpu in facts.gpus:
        capability = ".".join(map(str, gpu.capability)) if gpu.capability[0] else "unknown"
        parts = f", divided into {gpu.parts} parts (MIG)" if gpu.parts else ""
        yield ok(
            f"GPU {gpu.index}: {gpu.name}, compute capability {capability}, "
            f"{gpu.memory_bytes / 2**30:.0f} GiB{parts}."
        )


def have_tensor_float_32(facts: Facts) -> list[bool]:
    """Return whether the cards that train here have it; both values where they differ."""
    known = {gpu.capability >= _TENSOR_FLOAT_32 for gpu in facts.gpus if gpu.capability[0]}
    return sorted(known) if facts.tensorflow and facts.tensorflow.replicas else []


def tensor_float_32(facts: Facts) -> Iterator[Finding]:
    if len(have_tensor_float_32(facts)) > 1:
        names = {
            has_it: ", ".join(
                f"{gpu.index} ({gpu.name})"
                for gpu in facts.gpus
                if gpu.capability[0] and (gpu.capability >= _TENSOR_FLOAT_32) is has_it
            )
            for has_it in (True, False)
        }
        yield note(
            f"TensorFlow multiplies float32 in TensorFloat-32 by default on GPU {names[True]}, and "
            f"not on GPU {names[False]}, which does not have it: products differ by about 1e-3.",
            WITHOUT_TENSOR_FLOAT_32,
        )


def kernels(facts: Facts) -> Iterator[Finding]:
    found = facts.tensorflow
    if found is None or not found.kernels:
        return
    for gpu in facts.gpus:
        if gpu.capability == (0, 0) or _has_binary(gpu.capability, found.kernels):
            continue
        capability = ".".join(map(str, gpu.capability))
        start = (
            f"TensorFlow {found.tensorflow} has no kernels for GPU {gpu.index} ({gpu.name}). "
            f"Received: compute capability {capability}; it is built for "
            f"{', '.join(found.kernels)}."
        )
        if not _has_portable_code(gpu.capability, found.kernels):
            yield warning(
                f"{start} It leaves this GPU out.",
                "Install a version of TensorFlow whose build has this capability, or build it from "
                f"source for {capability}. To do without the GPU, leave it out of {VISIBLE}.",
            )
            continue
        known = " On such GPUs that is known to fail (CUDA_ERROR_INVALID_PTX)."
        yield warning(
            f"{start} It compiles them at its first step, which takes minutes, up to half an hour."
            f"{known if gpu.capability[0] >= _TOO_NEW else ''}",
            "Install a newer TensorFlow, or NVIDIA's container (nvcr.io/nvidia/tensorflow). Where "
            "the wait is all that is wrong, CUDA_CACHE_MAXSIZE=4294967296 keeps the result.",
        )


def gpu_links(facts: Facts) -> Iterator[Finding]:
    """What NCCL finds between the cards: pairs that are joined alike are one finding."""
    alike: dict[tuple[str, bool | None, bool], list[str]] = {}
    for link in facts.gpu_links:
        key = link.way, link.copies, link.by_cpu
        alike.setdefault(key, []).append(f"{link.first} and {link.second}")
    for (way, copies, by_cpu), pairs in alike.items():
        start = f"Between GPUs {', '.join(pairs)}: {way}."
        if copies is None:
            yield note(f"{start} The driver does not say whether they can copy directly.")
        elif not copies:
            yield note(
                f"{start} The driver allows no direct copies, so NCCL goes through the host's "
                "memory, which is slower."
            )
        elif by_cpu:
            yield note(
                f"{start} Direct copies are possible, but NCCL goes through the host's memory on "
                "most CPUs (Intel's, ARM's).",
                "Where the sum is slow, compare with NCCL_P2P_LEVEL=SYS, for direct copies.",
            )
        else:
            yield ok(f"{start} NCCL copies directly.")


def used_gpus(facts: Facts) -> Iterator[Finding]:
    found = facts.tensorflow
    if found is None or found.problem or not found.cuda or not facts.gpus:
        return
    text = facts.environ.get(VISIBLE)
    expected = len(facts.gpus) if text is None else _shown(text, facts.gpus)
    log = f" TensorFlow says: {_last(found.log)}" if found.log else ""
    if not expected:
        return
    if not found.gpus:
        yield warning(
            f"TensorFlow lists none of {expected} GPUs: training runs on the CPU.{log}",
            f"Install the libraries of CUDA {found.cuda}, for which it was built, with pip install "
            f"'tensorflow[and-cuda]=={found.tensorflow}'. The driver must not be older than them.",
        )
    elif found.replicas < len(found.gpus):
        yield warning(
            f"TensorFlow uses {found.replicas} of the {len(found.gpus)} GPUs that it lists.{log}",
            "It leaves out GPUs that are old, or that have few multiprocessors "
            "(TF_MIN_GPU_MULTIPROCESSOR_COUNT, 8 by default).",
        )
    else:
        yield ok(f"TensorFlow uses all GPUs that it may: {', '.join(found.gpus)}.")


def gpus_in_use(facts: Facts) -> Iterator[Finding]:
    for gpu in facts.gpus:
        if gpu.memory_bytes and gpu.used_bytes > _USED_PART * gpu.memory_bytes:
            yield warning(
                f"Others use {gpu.used_bytes / 2**30:.1f} of {gpu.memory_bytes / 2**30:.0f} GiB of "
                f"GPU {gpu.index} ({gpu.name}); TensorFlow takes all that is left.",
                f"`nvidia-smi` names the processes. End them, or choose other GPUs with {VISIBLE}.",
            )


def gpu_order(facts: Facts) -> Iterator[Finding]:
    """Whether "GPU:0" is the same for CUDA and for `nvidia-smi`."""
    names = {gpu.name for gpu in facts.gpus}
    if len(names) > 1 and facts.environ.get(ORDER) != FIXED_ORDER:
        yield note(
            f"With GPUs that differ ({', '.join(sorted(names))}) CUDA counts fast ones first, and "
            "nvidia-smi by their place on the bus.",
            f"{ORDER}={FIXED_ORDER} makes both count alike.",
        )


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
    built = [_number(name) for name in kernels]
    return any(major == capability[0] and minor <= capability[1] for major, minor in built)


def _has_portable_code(capability: tuple[int, int], kernels: Sequence[str]) -> bool:
    """PTX can be compiled for any GPU that is not older."""
    return any(_number(name) <= capability for name in kernels if name.startswith("compute_"))


def _number(name: str) -> tuple[int, int]:
    digits = (re.findall(r"\d+", name) or ["0"])[0]
    return int(digits[:-1] or 0), int(digits[-1])


def _last(log: str) -> str:
    telling = [
        line for line in log.splitlines() if re.search(r"dlopen|[Ii]gnoring|no kernel", line)
    ]
    return (telling or log.splitlines())[-1]
