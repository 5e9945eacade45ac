"""Small JSON files that a user's jobs on a host share, safe against whatever replaces them."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

logger = logging.getLogger("keras_het")

LARGEST_BYTES = 1 << 20
"""Of a file; a few thousand jobs need less."""
_LONGEST_WAIT_SECONDS = 0.1
_SECONDS_BETWEEN_TRIALS = 0.005
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
_NEITHER_FOLLOW_NOR_WAIT = (
    getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
)
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


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock, which the end of the process releases."""
    # the training step waits for it: a process that was stopped with the lock must not stop it
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():  # versions of filelock before 3.20 follow it
        raise OSError(f"{path} is a link. Received: one to {path.readlink()}. Remove it.")
    lock = FileLock(path, timeout=_LONGEST_WAIT_SECONDS, mode=0o600)
    try:
        lock.acquire(poll_interval=_SECONDS_BETWEEN_TRIALS)
    except Timeout as error:
        raise BlockingIOError(f"{path} is locked by another process.") from error
    except NotImplementedError as error:
        raise OSError(f"the file system of {path} has no locks ({error})") from error
    try:
        yield
    finally:
        lock.release()


def read_json(path: Path) -> Any:
    """Read a file; None, with one warning, unless it is a small JSON file of this user."""
    try:
        return json.loads(_read(path))
    except FileNotFoundError:
        return None
    except (OSError, RecursionError, ValueError) as error:
        ignore(path, error)
        return None


def ignore(path: Path, error: BaseException, what: str = "what it holds") -> None:
    """Report, once per file, that something in it is ignored."""
    level = logging.DEBUG if path in _warned else logging.WARNING
    _warned.add(path)
    logger.log(level, "%s: %s cannot be read and does not count (%r).", path, what, error)


def write_json(path: Path, values: object) -> None:
    """Replace a file, whatever it is; a process killed meanwhile leaves the old one or the new."""
    new = path.with_suffix(f"{path.suffix}.new")
    new.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NEITHER_FOLLOW_NOR_WAIT
    with os.fdopen(os.open(new, flags, 0o600), "w") as file:
        file.write(json.dumps(values))
    new.replace(path)


def _read(path: Path) -> str:
    with os.fdopen(os.open(path, os.O_RDONLY | _NEITHER_FOLLOW_NOR_WAIT), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_size > LARGEST_BYTES:
            raise ValueError(
                f"a file of at most {LARGEST_BYTES} bytes was expected. Received: "
                f"{stat.filemode(found.st_mode)}, {found.st_size} bytes."
            )
        return file.read(LARGEST_BYTES).decode()
