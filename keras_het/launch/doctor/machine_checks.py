"""Checks of a machine: packages of Python, CPUs, memory, and room on disks."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from keras_het import __version__
from keras_het.keras_backend import KERAS_BACKEND, NEEDED_BACKEND
from keras_het.launch.doctor.addresses import HOW_TO_CLOSE, open_to
from keras_het.launch.doctor.cluster_checks import num_tasks_here
from keras_het.launch.doctor.facts import EXTRAS, Facts, Finding, fault, note, ok, warning
from keras_het.seen_versions import FIRST_UNSEEN

_OLDEST = {"Keras": (3, 14), "TensorFlow": (2, 16)}
_TENSORBOARD_WITHOUT_IT = (2, 21)


def keras_backend(facts: Facts) -> Iterator[Finding]:
    chosen, place = _chosen_backend(facts)
    if chosen == NEEDED_BACKEND:
        yield ok(f"Keras runs on TensorFlow ({place}).")
        return
    yield fault(
        f"keras_het needs the TensorFlow backend of Keras. Received: {chosen!r} from {place}; "
        f"expected: {NEEDED_BACKEND!r}.",
        f"Set {KERAS_BACKEND}={NEEDED_BACKEND} in the environment of all workers, before keras is "
        "imported; it wins over keras.json.",
    )


def tensorflow_import(facts: Facts) -> Iterator[Finding]:
    found = facts.tensorflow
    if found is None:
        return
    if found.problem:
        yield fault(found.problem, found.fix)
        return
    cuda = f"built for CUDA {found.cuda}" if found.cuda else "built without CUDA"
    cudnn = f" and cuDNN {found.cudnn}" if found.cuda and found.cudnn else ""
    yield ok(
        f"keras_het {__version__}, TensorFlow {found.tensorflow} ({cuda}{cudnn}), Keras "
        f"{found.keras}."
    )


def versions(facts: Facts) -> Iterator[Finding]:
    found = facts.tensorflow
    if found is None or found.problem:
        return
    for name, text in (("TensorFlow", found.tensorflow), ("Keras", found.keras)):
        version = _numbers(text)
        oldest, unseen = (".".join(map(str, bounds[name])) for bounds in (_OLDEST, FIRST_UNSEEN))
        expected = f"Received: {name} {text}; expected: from {oldest} to below {unseen}."
        if version < _OLDEST[name]:
            yield fault(
                f"{name} is too old. {expected}",
                "pip install --upgrade . in the checkout of keras_het",
            )
        elif version >= FIRST_UNSEEN[name]:
            yield warning(
                f"keras_het has not been tested with this version. {expected}",
                f"If training fails, or its numbers differ: pip install '{name.lower()}<{unseen}'",
            )


def extras(facts: Facts) -> Iterator[Finding]:
    installed = [f"{extra} {version}" for extra, version in facts.extras.items() if version]
    if installed:
        yield ok(f"Extras installed: {', '.join(installed)}.")
    board = facts.extras.get("tensorboard", "")
    if board and not facts.has_pkg_resources and _numbers(board) < _TENSORBOARD_WITHOUT_IT:
        yield warning(
            f"TensorBoard {board} cannot start: it imports pkg_resources, which the installed "
            "setuptools no longer provides.",
            "pip install 'setuptools<82'",
        )
    for extra, version in facts.extras.items():
        if not version:
            yield note(
                f"The extra {extra!r} is not installed: needed only {EXTRAS[extra][1]}.",
                f"pip install '.[{extra}]' in the checkout of keras_het",
            )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def emulation(facts: Facts) -> Iterator[Finding]:
    if facts.environ.get("KERAS_HET_EMULATED_DEVICES"):
        yield warning(
            "KERAS_HET_EMULATED_DEVICES is set: this process's devices wait, to emulate others.",
            "Unset it to train at full speed; keras-het run --speeds sets it where it belongs.",
        )


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


SHARED_MEMORY = Path("/dev/shm")
_LEAST_CPUS_PER_GPU = 2.0
_LEAST_MEMORY = 2 * 2**30
_LEAST_SHARED_MEMORY = 256 * 2**20
_LEAST_ROOM = 2**30
_THREADS = "TF_NUM_INTRAOP_THREADS"


def cpu_budget(facts: Facts) -> Iterator[Finding]:
    here = num_tasks_here(facts.cluster)
    each = facts.cpus / here
    quota = f", of which a cgroup's quota leaves {facts.cpus:g}" if _has_quota(facts) else ""
    workers = f" for each of {here} tasks on this machine" if here > 1 else ""
    yield ok(f"CPUs: {facts.affinity}{quota}; {each:g}{workers or ' for this worker'}.")
    replicas = facts.tensorflow.replicas if facts.tensorflow else 0
    if replicas and each / replicas < _LEAST_CPUS_PER_GPU:
        yield warning(
            f"{each:g} CPUs feed {replicas} GPUs: the input may not keep up. Expected: "
            f"{_LEAST_CPUS_PER_GPU:g} or more for each GPU.",
            "Give this process more CPUs, or prepare data on other machines (tf.data service).",
        )


def cpu_quota(facts: Facts) -> Iterator[Finding]:
    if not _has_quota(facts):
        return
    text = facts.environ.get(_THREADS, "")
    threads = int(text) if text.isdecimal() and int(text) else facts.affinity
    if threads > 2 * facts.cpus:
        yield warning(
            f"A cgroup's quota lets {facts.cpus:g} CPUs run, and TensorFlow starts {threads} "
            "threads for its operations: the kernel stops all of them for a part of each period, "
            "also those that read the input and answer other workers.",
            f"Set {_THREADS}={max(1, int(facts.cpus))} and TF_NUM_INTEROP_THREADS="
            f"{max(2, int(facts.cpus))}, or raise the quota (docker run --cpus, Kubernetes "
            "resources.limits.cpu).",
        )


def memory(facts: Facts) -> Iterator[Finding]:
    if not facts.memory_limit:
        return
    left = facts.memory_limit - facts.memory_used
    text = f"Memory: {left / 2**30:.1f} of {facts.memory_limit / 2**30:.1f} GiB are free."
    if left < _LEAST_MEMORY:
        yield warning(
            f"{text} TensorFlow and a small model need {_LEAST_MEMORY / 2**30:g} GiB.",
            "End other programs, or raise the limit of the cgroup (docker run --memory).",
        )
    else:
        yield ok(text)


def shared_memory(facts: Facts) -> Iterator[Finding]:
    num_gpus = len(facts.gpus)
    if num_gpus < 2 or not SHARED_MEMORY.is_dir():
        return
    room = shutil.disk_usage(SHARED_MEMORY).free
    if room < _LEAST_SHARED_MEMORY:
        yield warning(
            f"{SHARED_MEMORY} has room for {room / 2**20:.0f} MiB, and NCCL sums {num_gpus} GPUs "
            f"through it. Expected: {_LEAST_SHARED_MEMORY // 2**20} MiB or more.",
            "Start the container with --shm-size=1g or --ipc=host (Kubernetes: an emptyDir of "
            "medium Memory).",
        )


def room_for_logs(facts: Facts) -> Iterator[Finding]:
    if facts.log_dir is not None:
        yield from _room("The folder for logs", facts.log_dir, "--log-dir")
    yield from _room("The folder for temporary files", Path(tempfile.gettempdir()), "TMPDIR")


def public_address(facts: Facts) -> Iterator[Finding]:
    if facts.public_addresses:
        yield warning(open_to(facts.public_addresses), HOW_TO_CLOSE)


def _room(name: str, folder: Path, setting: str) -> Iterator[Finding]:
    existing = next(
        path for path in (folder.absolute(), *folder.absolute().parents) if path.exists()
    )
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        yield fault(
            f"{name} cannot be written. Received: {folder}; {existing} is no folder that this user "
            "may write to.",
            f"Give another one ({setting}), or change its owner.",
        )
        return
    room = shutil.disk_usage(existing).free
    text = f"{name}, {folder}, has room for {room / 2**30:.1f} GiB."
    if room < _LEAST_ROOM:
        yield warning(
            f"{text} Expected: {_LEAST_ROOM / 2**30:g} GiB or more for logs and backups.",
            f"Make room, or give another one ({setting}).",
        )
    else:
        yield note(text)


def _has_quota(facts: Facts) -> bool:
    return facts.cpus < facts.affinity
