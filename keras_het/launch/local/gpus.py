"""Which GPU each worker of this machine sees."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from keras_het.telemetry.hardware import Nvml, NvmlMissingError

VISIBLE = "CUDA_VISIBLE_DEVICES"
AUTO = "auto"


def present_gpus(environ: Mapping[str, str] = os.environ, module: Any = None) -> list[str]:
    """Return what CUDA calls the GPUs of this machine, or those that the environment leaves."""
    # Parts of a divided GPU (MIG) count, not the GPU itself: CUDA shows one part to a process.
    if environ.get(VISIBLE) is not None:
        given = [each.strip() for each in environ[VISIBLE].split(",") if each.strip()]
        # CUDA sees none from the first -1 on
        return given[: given.index("-1")] if "-1" in given else given
    nvml = Nvml(module)
    try:
        devices = [part for gpu in nvml.gpus() if gpu for part in nvml.parts_of(gpu) or [gpu]]
        return [name for each in devices if (name := nvml.ask("DeviceGetUUID", each))]
    finally:
        nvml.close()


def deal_gpus(
    environ: Mapping[str, str], num_workers: int, num_async_workers: int, are_emulated: bool
) -> list[str]:
    """Return the GPUs that each local worker may see; no items if there are none."""
    # Emulated devices are CPUs, and a group has devices of one type: async workers go without
    # before a group does. NCCL lets no two workers share one.
    try:
        present = present_gpus(environ)
    except NvmlMissingError:
        return []
    number = num_workers if len(present) >= num_workers else num_workers - num_async_workers
    if are_emulated or len(present) < number:
        return [""] * num_workers if present else []
    if any(name.startswith("MIG-") for name in present):  # CUDA shows a process one part only
        present = present[:number]
    return [",".join(present[i::number]) if i < number else "" for i in range(num_workers)]


def choose_gpus(wanted: str, present: Sequence[str], num_async_workers: int = 0) -> list[str]:
    """Return the GPU of each worker: "auto" for all, a number, or places or UUIDs with commas."""
    if wanted == AUTO:
        chosen = list(present)
    elif wanted.isdecimal():
        chosen = list(present[: int(wanted)])
        if len(chosen) < int(wanted):
            raise ValueError(_problem(wanted, present))
    else:
        names = [each.strip() for each in wanted.split(",") if each.strip()]
        places = [int(each) if each.isdecimal() else _place(each, present) for each in names]
        if not places or any(place not in range(len(present)) for place in places):
            raise ValueError(_problem(wanted, present))
        if len(set(places)) < len(places):
            raise ValueError(
                f"each worker needs its own GPU. Received: --gpus {wanted}. Name each once."
            )
        chosen = [present[place] for place in places]
    if not chosen:
        raise ValueError(_problem(wanted, present))
    if num_async_workers >= len(chosen):
        raise ValueError(
            f"no worker is left for the synchronous group. Received: --async-workers "
            f"{num_async_workers} of {len(chosen)} GPU(s); give fewer."
        )
    return chosen


def _place(name: str, present: Sequence[str]) -> int:
    """Return the place of the GPU whose UUID begins so, as CUDA finds it; -1 if there is none."""
    found = [place for place, each in enumerate(present) if each.startswith(name)]
    return found[0] if len(found) == 1 else -1


def _problem(wanted: str, present: Sequence[str]) -> str:
    seen = f"{len(present)} GPU(s) ({', '.join(present)})" if present else "no GPU"
    return (
        f"there are no such GPUs. Received: --gpus {wanted}, where {seen} can be used here; "
        f"expected: {AUTO}, a number, or places such as 0,2 (with a comma: 0, for the first). See "
        f"`keras-het doctor`, and {VISIBLE} if it is set."
    )


def environment_of(gpus: str) -> dict[str, str]:
    """Return the variables with which a worker sees these GPUs, and takes memory as it needs it."""
    return {VISIBLE: gpus, "TF_FORCE_GPU_ALLOW_GROWTH": "true"}
