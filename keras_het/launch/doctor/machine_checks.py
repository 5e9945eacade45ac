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
from keras_het.launch.doctor.addresses import HOW_TO_CLOSE, open_to
from keras_het.launch.doctor.cluster_checks import num_tasks_here
from keras_het.launch.doctor.facts import FAULT, Facts, Finding, expect, fault, note, ok, unless
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
    cuda = f"for CUDA {found.cuda} and cuDNN {found.cudnn}" if found.cuda else "without CUDA"
    product = f"keras_het {__version__}, TensorFlow {found.tensorflow} (built {cuda})"
    yield (
        fault("tensorflow_import", found.problem, found.fix)
        if found.problem
        else ok("tensorflow_import", f"{product}, Keras {found.keras}.")
    )
    for name, text in (("TensorFlow", found.tensorflow), ("Keras", found.keras)):
        if text:
            yield from _version(name, text)
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
    yield from _extras(facts)
    yield unless(
        "emulation",
        not facts.environ.get("KERAS_HET_EMULATED_DEVICES"),
        "KERAS_HET_EMULATED_DEVICES is set: this process's devices wait, to emulate others.",
        "Unset it to train at full speed; keras-het run --emulate-speeds sets it where it belongs.",
    )


def _version(name: str, text: str) -> Iterator[Finding]:
    oldest, unseen = (".".join(map(str, bounds[name])) for bounds in (_OLDEST, FIRST_UNSEEN))
    expected = f"Received: {name} {text}; expected: from {oldest} to below {unseen}."
    yield unless(
        "versions",
        _numbers(text) >= _OLDEST[name],
        f"{name} is too old. {expected}",
        "pip install --upgrade . in the checkout of keras_het",
        FAULT,
    )
    yield unless(
        "versions",
        _numbers(text) < FIRST_UNSEEN[name],
        f"keras_het has not been tested with this version. {expected}",
        f"If training fails, or its numbers differ: pip install '{name.lower()}<{unseen}'",
    )


def _extras(facts: Facts) -> Iterator[Finding]:
    board = facts.extras.get("tensorboard", "")
    needs_it = board and _numbers(board) < _TENSORBOARD_WITHOUT_IT
    yield unless(
        "extras",
        facts.has_pkg_resources or not needs_it,
        f"TensorBoard {board} cannot start: it imports pkg_resources, which the installed "
        "setuptools no longer provides.",
        "pip install 'setuptools<82'",
    )
    installed = [f"{extra} {version}" for extra, version in facts.extras.items() if version]
    missing = [extra for extra, version in facts.extras.items() if not version]
    if facts.extras:
        yield note(
            "extras",
            f"Extras installed: {', '.join(installed) or 'none'}; not: {', '.join(missing)}.",
            "pip install '.[NAME]' in the checkout of keras_het installs one." if missing else "",
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
