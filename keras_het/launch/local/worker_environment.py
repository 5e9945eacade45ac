"""The environment variables that each local worker is started with."""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any

from keras_het.exchange.secret import SECRET_FILE_VARIABLE, SECRET_VARIABLE
from keras_het.planning.time_model import LinearTimeModel
from keras_het.seen_versions import KERAS_BACKEND, NEEDED_BACKEND
from keras_het.strategy.cluster.cluster_config import SERVICE_ADDRESS
from keras_het.telemetry.hardware import Nvml, NvmlMissingError

KERAS_HET_EMULATED_DEVICES = "KERAS_HET_EMULATED_DEVICES"

_DEFAULT_SECONDS_PER_SAMPLE = 0.004


@dataclass(frozen=True)
class Emulation:
    """One emulated device per worker.

    A device of speed `s` takes at least `fixed_seconds + seconds_per_sample / s` for a step of one
    sample. It waits for that time without burning CPU, so several fit on one machine. Asynchronous
    ones compute while their hosts continue, as GPUs do.
    """

    speeds: tuple[float, ...]
    seconds_per_sample: float = _DEFAULT_SECONDS_PER_SAMPLE
    fixed_seconds: float = 0.0
    asynchronous: bool = False

    def __post_init__(self) -> None:
        if not self.speeds or not all(0 < speed < float("inf") for speed in self.speeds):
            raise ValueError(
                "Emulated devices need positive finite speeds, one for each worker. Received: "
                f"speeds={self.speeds}. Give relative speeds such as 4,2,1."
            )
        self.devices()

    def devices(self) -> list[dict[str, Any]]:
        """Return the devices as `read_emulated_devices` reads them."""
        kind = {"asynchronous": True} if self.asynchronous else {}
        models = [
            LinearTimeModel(self.fixed_seconds, self.seconds_per_sample / speed)
            for speed in self.speeds
        ]
        pairs = zip(self.speeds, models, strict=True)
        return [{"speed": speed, **asdict(model), **kind} for speed, model in pairs]

    def environment_of(self, worker_index: int) -> dict[str, str]:
        return {KERAS_HET_EMULATED_DEVICES: json.dumps([self.devices()[worker_index]])}

    def describe(self) -> str:
        speeds = ":".join(f"{speed:g}" for speed in self.speeds)
        times = ", ".join(f"{1000 * each['seconds_per_sample']:g}" for each in self.devices())
        fixed = f" plus {1000 * self.fixed_seconds:g} ms a step" if self.fixed_seconds else ""
        kind = "asynchronous device" if self.asynchronous else "device"
        return (
            f"EMULATION: {kind} speeds {speeds} are emulated by waiting ({times} ms per sample"
            f"{fixed}). Times of this run say nothing about real devices."
        )


# Hides TensorFlow's information messages, of which each worker prints some 50 lines at startup.
QUIET_TENSORFLOW = {"TF_CPP_MIN_LOG_LEVEL": "1"}
_LEAST_INTEROP_THREADS = 2
# Not TOKENIZERS_PARALLELISM or MAX_TOKENS, nor GOOGLE_APPLICATION_CREDENTIALS, which is a path.
_SECRETS = re.compile(r"(TOKEN|SECRET)(_|$)|PASSWORD|PASSWD|(API|ACCESS|PRIVATE)_?KEY")
_OURS = "KERAS_HET_*"


def secret_names(environ: Iterable[str], kept: Iterable[str]) -> list[str]:
    """Return names like those of secrets: who reaches a worker's port reads its environment."""
    patterns = [_OURS, *kept]
    return sorted(
        name
        for name in environ
        if _SECRETS.search(name.upper()) and not any(fnmatchcase(name, each) for each in patterns)
    )


def worker_environment(
    worker_index: int,
    addresses: Sequence[str],
    threads: int,
    inherited: Mapping[str, str],
    emulation: Emulation | None = None,
    num_async_workers: int = 0,
) -> dict[str, str]:
    defaults = {
        "TF_NUM_INTRAOP_THREADS": str(threads),
        # A worker that waits in a collective needs a second thread to answer its peers. An emulated
        # device waits in a thread too; a real one would leave that thread to them.
        "TF_NUM_INTEROP_THREADS": str(max(_LEAST_INTEROP_THREADS, threads) + bool(emulation)),
        "OMP_NUM_THREADS": str(threads),
        # Without a terminal Python would buffer its output until the worker ends.
        "PYTHONUNBUFFERED": "1",
    }
    emulated = emulation.environment_of(worker_index) if emulation else {}
    tf_config = tf_config_of(worker_index, addresses, num_async_workers)
    return with_backend({**defaults, **inherited, **emulated, "TF_CONFIG": tf_config})


def tf_config_of(worker_index: int, addresses: Sequence[str], num_async_workers: int) -> str:
    """Return TF_CONFIG of one of the workers, of which the last ones are asynchronous."""
    num_sync = len(addresses) - num_async_workers
    cluster = {"worker": list(addresses[:num_sync])}
    task = {"type": "worker", "index": worker_index}
    if num_async_workers:
        cluster["async"] = list(addresses[num_sync:])
    if worker_index >= num_sync:
        task = {"type": "async", "index": worker_index - num_sync}
    return json.dumps({"cluster": cluster, "task": task})


def with_backend(environment: Mapping[str, str]) -> dict[str, str]:
    # as Keras does; the default overrides the user's keras.json
    backend = environment.get(KERAS_BACKEND) or NEEDED_BACKEND
    return {**environment, KERAS_BACKEND: backend}


def service_environment(
    address: str, inherited: Mapping[str, str], secret: str | None = None
) -> dict[str, str]:
    given = inherited.get(SECRET_VARIABLE) or inherited.get(SECRET_FILE_VARIABLE)
    own = {} if given else {SECRET_VARIABLE: secret or secrets.token_hex(32)}
    return {SERVICE_ADDRESS: address, **own}


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
        chosen = list(present[: int(wanted)]) if int(wanted) <= len(present) else []
    else:
        names = [each.strip() for each in wanted.split(",") if each.strip()]
        places = [int(each) if each.isdecimal() else _place(each, present) for each in names]
        are_present = all(place in range(len(present)) for place in places)
        chosen = [present[place] for place in places] if are_present else []
    if not chosen:
        seen = f"{len(present)} GPU(s) ({', '.join(present)})" if present else "no GPU"
        raise ValueError(
            f"there are no such GPUs. Received: --gpus {wanted}, where {seen} can be used here; "
            f"expected: {AUTO}, a number, or indices such as 0,2 (with a comma: 0, for the first). "
            f"See `keras-het doctor`, and {VISIBLE} if it is set."
        )
    if len(set(chosen)) < len(chosen):
        raise ValueError(
            f"each worker needs its own GPU. Received: --gpus {wanted}. Name each once."
        )
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


def environment_of(gpus: str) -> dict[str, str]:
    """Return the variables with which a worker sees these GPUs, and takes memory as it needs it."""
    return {VISIBLE: gpus, "TF_FORCE_GPU_ALLOW_GROWTH": "true"}
