"""Checks of GPUs: what the driver has, and what TensorFlow makes of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from keras_het.launch.doctor.facts import Facts, Finding, Gpu, expect, note, ok, unless, warning

VISIBLE = "CUDA_VISIBLE_DEVICES"
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
    if text is not None and facts.gpus:
        shown = _shown(text, facts.gpus)
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
    yield from _tensor_float_32(facts)
    yield from _used(facts)
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


def _tensor_float_32(facts: Facts) -> Iterator[Finding]:
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


def _used(facts: Facts) -> Iterator[Finding]:
    found, text = facts.tensorflow, facts.environ.get(VISIBLE)
    expected = len(facts.gpus) if text is None else _shown(text, facts.gpus)
    if not found.cuda or not expected:
        return
    names = f": {', '.join(found.gpus)}" if found.gpus else ", and lists none"
    yield expect(
        "used_gpus",
        0 < len(found.gpus) <= found.replicas,
        f"TensorFlow uses {found.replicas} of {expected} GPUs that it may{names}.",
        f"TensorFlow says: {_last(found.log)}" if found.log else "",
        "It leaves out GPUs that are old, or that have few multiprocessors "
        "(TF_MIN_GPU_MULTIPROCESSOR_COUNT, 8 by default)."
        if found.gpus
        else f"Install the libraries of CUDA {found.cuda}, for which it was built, with pip "
        f"install 'tensorflow[and-cuda]=={found.tensorflow}', and a driver (of the machine, where "
        "this is a container) that is not older than them.",
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
    built = [int((re.findall(r"\d+", name) or ["0"])[0]) for name in kernels]
    major, minor = capability
    return any(each // 10 == major and each % 10 <= minor for each in built)


def _last(log: str) -> str:
    telling = [
        line for line in log.splitlines() if re.search(r"dlopen|[Ii]gnoring|no kernel", line)
    ]
    return (telling or log.splitlines())[-1]
