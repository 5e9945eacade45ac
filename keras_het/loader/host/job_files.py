"""One small JSON file for each of a user's jobs on a host, which the others read."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import stat
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from keras_het.loader.host.division import Entry, Quota
from keras_het.planning.loader import JobModel, ReadingNeed

_logger = logging.getLogger(__name__)

LONGEST_SILENCE_SECONDS = 600.0
"""After these a job no longer counts."""
_LARGEST_BYTES = 1 << 16
_LARGEST = 1e15
"""More than any count, or time in seconds since 1970."""
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
_warned: set[Path] = set()


def own_folder() -> Path:
    """Return the user's folder among the temporary files, creating it if it is missing."""
    user = os.getuid() if hasattr(os, "getuid") else "user"
    folder = Path(tempfile.gettempdir()) / f"keras_het-{user}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()  # not the target of a link
    is_private = not hasattr(os, "getuid") or (
        found.st_uid == os.getuid() and not found.st_mode & _OTHERS_MAY_WRITE
    )
    if not (stat.S_ISDIR(found.st_mode) and is_private):
        raise PermissionError(
            f"{folder} must be a folder of this user (id {user}) that nobody else may write to. "
            f"Received: {stat.filemode(found.st_mode)} of the user with id {found.st_uid}. Remove "
            "it, or set TMPDIR to another folder."
        )
    return folder


def write_job(path: Path, entry: Entry) -> None:
    """Replace a job's file; a process killed meanwhile leaves the old one or the new."""
    values = {"process": _identity(os.getpid()), **dataclasses.asdict(entry)}
    path.parent.mkdir(exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps({**values, "cpu_set": sorted(entry.cpu_set)}))
    new.replace(path)


def read_jobs(folder: Path) -> dict[str, tuple[int, Entry]]:
    """Return the process and the entry of each job that trains; files of others are removed."""
    jobs = {}
    for path in folder.glob("*.json"):
        try:
            values = _read(path)
            if values is not None:
                jobs[path.stem] = int(values["process"]["pid"]), _entry_of(values)
        except FileNotFoundError:
            pass  # the job has just left
        except (
            AttributeError,
            KeyError,
            OSError,
            OverflowError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            level = logging.DEBUG if path in _warned else logging.WARNING
            _warned.add(path)
            _logger.log(level, "%s cannot be read and does not count (%r).", path, error)
    return jobs


def _read(path: Path) -> Any:
    """Return what a job has written; None, and no file, if it no longer trains."""
    found = path.lstat()
    # its training ended in an error, and the process lives on
    is_silent = abs(time.time() - found.st_mtime) > LONGEST_SILENCE_SECONDS
    if not is_silent:
        if not stat.S_ISREG(found.st_mode) or found.st_size > _LARGEST_BYTES:
            raise ValueError(
                f"a file of at most {_LARGEST_BYTES} bytes was expected. Received: "
                f"{stat.filemode(found.st_mode)}, {found.st_size} bytes."
            )
        values = json.loads(path.read_bytes())
        if _is_alive(values["process"]):
            return values
    path.unlink(missing_ok=True)
    return None


def _identity(pid: int) -> dict[str, Any]:
    try:
        return {"pid": pid, "started": psutil.Process(pid).create_time()}
    except (psutil.Error, RuntimeError, ValueError) as error:
        # for example in a container whose /proc lacks the start time
        raise OSError(f"the system does not tell when process {pid} started ({error})") from error


def _is_alive(identity: Any) -> bool:
    """Tell whether a process still runs, and is not a new one with the same id."""
    try:
        process = psutil.Process(int(identity["pid"]))
        same = abs(process.create_time() - float(identity["started"])) < 1.0
        return same and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, RuntimeError):  # as in `_identity`
        return False


def _entry_of(values: Any) -> Entry:
    """Parse an entry, which another version of this package may have written differently."""
    quota, reading, max_reader_threads = (
        values[name] for name in ("quota", "reading", "max_reader_threads")
    )
    cpu_set = frozenset(int(_number(cpu)) for cpu in values["cpu_set"])
    if not cpu_set:
        raise ValueError("a job must have CPUs")
    return Entry(
        JobModel(**{name: _number(value) for name, value in values["job"].items()}),
        _positive(values["cpus"]),
        cpu_set,
        None if quota is None else Quota(str(quota["group"]), _positive(quota["cpus"])),
        None
        if reading is None
        else ReadingNeed(**{name: _number(value) for name, value in reading.items()}),
        None if max_reader_threads is None else int(_number(max_reader_threads, least=1)),
    )


def _number(value: Any, least: float = 0.0) -> float:
    number = float(value)
    if not least <= number <= _LARGEST:
        raise ValueError(f"a number from {least:g} to {_LARGEST:g} was expected, received: {value}")
    return number


def _positive(value: Any) -> float:
    return _number(value, least=1e-6)
