"""Divides a host's CPUs among the loaders of all jobs that run on it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from keras_het.planning.loader import JobModel, allocate_loaders

try:
    import fcntl
except ImportError:  # no such lock on this operating system: every job is alone
    fcntl = None  # type: ignore[assignment]


LONGEST_SILENCE_SECONDS = 600.0


class HostBudget:
    """This job's entry in a small file that all jobs of a user on a host share.

    Each job writes its model and reads those of the others, under a lock, and all compute the same
    division by marginal gain. The entry of a process that is gone, or silent for ten minutes,
    counts no longer.

    Args:
        cpus: CPUs of the host that this process may use.
        path: the file; by default one for each user in the folder for temporary files.

    Raises:
        PermissionError: if the default folder belongs to somebody else.
    """

    def __init__(self, cpus: float, path: Path | None = None) -> None:
        self._cpus = cpus
        self._path = path or _own_folder() / "loaders.json"
        self._name = uuid.uuid4().hex
        self.jobs = 1

    def update(self, job: JobModel) -> float:
        """Writes the model of this job and returns its part of the CPUs.

        Args:
            job: the model as of now.

        Returns:
            CPUs that the loaders of this job may use; the whole host if it is alone.
        """
        if fcntl is None:
            return self._cpus
        with self._locked():
            entries = self._read()
            entry = {"written": time.time(), "job": dataclasses.asdict(job)}
            entries[self._name] = {**_identity(os.getpid()), **entry}
            self._write(entries)
        self.jobs = len(entries)
        if self.jobs == 1:
            return self._cpus
        names = sorted(entries)
        jobs = [JobModel(**entries[name]["job"]) for name in names]
        given = allocate_loaders(jobs, self._cpus)
        cpus = [n * one.cpus_per_loader for n, one in zip(given, jobs, strict=True)]
        spare = max(self._cpus - sum(cpus), 0.0) / len(jobs)
        return max(cpus[names.index(self._name)] + spare, 0.1)

    def leave(self) -> None:
        """Gives this job's part back to the others."""
        if fcntl is None:
            return
        with contextlib.suppress(OSError), self._locked():
            entries = self._read()
            entries.pop(self._name, None)
            self._write(entries)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.with_suffix(".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield  # closing the file unlocks it, as does the end of a process

    def _read(self) -> dict[str, Any]:
        try:
            entries = json.loads(self._path.read_text())
            return {name: entry for name, entry in entries.items() if _is_alive(entry)}
        except (OSError, ValueError, AttributeError, KeyError, TypeError):
            return {}  # none yet, or not ours: begin anew

    def _write(self, entries: dict[str, Any]) -> None:
        # a process that is killed here leaves the old file or the new one
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(entries))
        new.replace(self._path)


def _own_folder() -> Path:
    user = os.getuid() if hasattr(os, "getuid") else "user"
    folder = Path(tempfile.gettempdir()) / f"keras_het-{user}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if hasattr(os, "getuid") and folder.stat().st_uid != os.getuid():
        raise PermissionError(
            f"{folder} belongs to another user. Remove it, or set TMPDIR to another folder."
        )
    return folder


def _identity(pid: int) -> dict[str, Any]:
    return {"pid": pid, "started": psutil.Process(pid).create_time()}


def _is_alive(entry: dict[str, Any]) -> bool:
    """Whether the process of an entry still trains, and is not another one with the same number."""
    if time.time() - float(entry["written"]) > LONGEST_SILENCE_SECONDS:
        return False  # its training ended in an error, and the process lives on
    try:
        process = psutil.Process(int(entry["pid"]))
        same = abs(process.create_time() - float(entry["started"])) < 1.0
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
