"""Backups on disk: one file each, either complete or absent."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import io
import logging
import math
import os
import re
import shutil
import socket
import stat
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import h5py
import numpy as np

if TYPE_CHECKING:
    import keras

_logger = logging.getLogger(__name__)
_NAME = re.compile(r"backup-(\d{1,18})-([0-9a-f]{64})\.weights\.h5")
_STATE = "keras_het"
_SEED = "seed/"
_NUM_WEIGHTS = "num_weights"
_OTHER_FORMATS = ("latest.weights.h5", "training_metadata.json", "data_position.json")
_LOCK = "keras_het.lock"
_ASIDE = "incomplete.weights.h5"
RUN = "KERAS_HET_RUN"
"""Variable with the name of a run, which is the same however often its workers start again."""
_SHARED_MEMORY = Path("/dev/shm")
_IS_LOCKED = (errno.EACCES, errno.EAGAIN)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CHUNK_BYTES = 2**20
# HDF5's overhead: per file, and per variable.
_FILE_BYTES, _VARIABLE_BYTES = 2**16, 2**11


# Written under another name, flushed and renamed before the previous one goes: whenever the process
# or the machine stops, the folder has a complete backup.
class BackupFolder:
    """The backups of a training: weights files of Keras that also hold the rest of its state."""

    def __init__(self, path: str | Path, num_kept: int, is_private: bool = False) -> None:
        if "://" in str(path):
            raise ValueError(
                "A backup is renamed when it is complete, which needs a file system. Received: "
                f"backup_dir={str(path)!r}. Give a folder, such as a mounted one."
            )
        self._is_private = is_private
        # Keras removes the folder at the end, which a link refuses.
        self.path = Path(path) if is_private else Path(path).resolve()
        self._num_kept = num_kept
        self._whole: list[Path] = []
        self._left_alone: set[Path] = set()
        self._lock: IO[str] | None = None

    @property
    def newest(self) -> Path | None:
        """The backup that was found or added last, None if there is none."""
        return self._whole[-1] if self._whole else None

    @property
    def number(self) -> int:
        """The number of the newest backup, 0 if there is none."""
        name = _NAME.fullmatch(self.newest.name) if self.newest else None
        return int(name[1]) if name else 0

    def lock(self) -> None:
        """Keep other processes from writing here until `unlock`, or the end of this process."""
        path = self.path / _LOCK
        while self._lock is None:
            try:
                self._make_room(path if path.is_symlink() else None)
                file = path.open("a+")
            except OSError as error:
                raise self._error(error, path) from error
            try:
                # Not flock: processes that this one forks would hold that for longer than it lives.
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                with file:
                    file.seek(0)
                    holder = file.read()
                if error.errno not in _IS_LOCKED:
                    _logger.warning(
                        "%s cannot be locked: %s. Nothing would notice that two trainings write "
                        "backups there.",
                        path,
                        error,
                    )
                    return
                raise ValueError(
                    f"Another training writes its backups here. Received: backup_dir={self.path}, "
                    f"locked by {holder or 'a process that has just started'}. Give each training "
                    "its own backup_dir, or end the other one first."
                ) from None
            with contextlib.suppress(OSError):
                if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    self._lock = file
            if self._lock is None:  # its last owner has just removed it
                file.close()
        with contextlib.suppress(OSError):  # a full disk
            file.truncate(0)
            started = time.strftime("%Y-%m-%d %H:%M:%S %z")
            file.write(f"process {os.getpid()} on {socket.gethostname()} since {started}")
            file.flush()

    def unlock(self) -> None:
        if self._lock is not None:
            with contextlib.suppress(OSError):
                (self.path / _LOCK).unlink()
            with contextlib.suppress(OSError):
                self._lock.close()
            self._lock = None

    def find(self) -> str:
        """Find the newest backup with intact content."""
        self._refuse_other_formats()
        self._whole = []
        damaged: list[Path] = []
        for number in sorted(found := self._found(), reverse=True):
            path, expected = found[number]
            if _is_whole(path, expected):
                self._whole = [path]
                if damaged:
                    _logger.warning("Continuing from %s; damaged: %s.", path, _listed(damaged))
                return expected
            damaged.append(path)
        if damaged:
            raise OSError(
                f"The backup is damaged, and there is no other. Received: {_listed(damaged)}, "
                "not a file whose content has the SHA-256 in its name. Restore the file from a "
                "copy, or remove it to train from the beginning; double_checkpoint=True keeps two."
            )
        return ""

    def leave(self, path: Path | None) -> None:
        """Never remove this backup, which is another training's."""
        if path is not None:
            self._left_alone.add(path)

    def restore(self, model: keras.Model) -> dict[str, np.ndarray]:
        optimizer = model.optimizer
        if optimizer is not None and not optimizer.built:
            with model.distribute_strategy.scope():
                optimizer.build(model.trainable_variables)
        state = self.state()
        found, expected = len(model.weights), state.pop(_NUM_WEIGHTS, None)
        if expected not in (None, found):
            raise self._other_model_error(f"{found} weights; expected: {expected}")
        try:
            model.load_weights(str(self.newest))
        except ValueError as error:
            problem, _, _ = str(error).partition("\n\nList of objects")
            raise self._other_model_error(" ".join(problem.split())) from error
        for place, seed in enumerate(_seeds(model)):
            if (saved := state.pop(f"{_SEED}{place}", None)) is not None:
                seed.assign(saved)
        return state

    def state(self) -> dict[str, np.ndarray]:
        """The state stored with the weights in the newest backup, {} if there is none."""
        if self.newest is None:
            return {}
        try:
            with h5py.File(self.newest, "r") as file:
                content = io.BytesIO(file[_STATE][()].tobytes())
            with np.load(content) as arrays:
                return dict(arrays)
        except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
            raise OSError(
                f"The backup holds no state of a training. Received: {self.newest}, {error}; "
                "expected: a file as this callback writes them. Remove it, or give another "
                "backup_dir; model.load_weights reads weights alone."
            ) from error

    def add(self, model: keras.Model, state: Mapping[str, Any], number: int | None = None) -> None:
        """Write a backup, then remove those that are not kept."""
        content = io.BytesIO()
        seeds = {f"{_SEED}{n}": seed.value.numpy() for n, seed in enumerate(_seeds(model))}
        np.savez(content, **{**state, **seeds, _NUM_WEIGHTS: np.array(len(model.weights))})
        with self._aside() as aside:
            _reserve(aside, _bytes_needed(model) + content.tell())
            model.save_weights(str(aside), overwrite=True)
            with h5py.File(aside, "r+") as file:
                file[_STATE] = np.frombuffer(content.getvalue(), np.uint8)
            _to_disk(aside)
            number = number or max(self._found(), default=0) + 1
            self._complete(aside, f"backup-{number}-{_sha256(aside)}.weights.h5")

    def adopt(self, name: str, content: IO[bytes]) -> None:
        """Write a backup that another folder has, under its name."""
        with self._aside() as aside:
            with aside.open("wb") as file:
                shutil.copyfileobj(content, file, _CHUNK_BYTES)
            _to_disk(aside)
            self._complete(aside, name)

    @contextlib.contextmanager
    def _aside(self) -> Iterator[Path]:
        """Give the path of a file that is not a backup yet; remove it after an error."""
        aside = self.path / _ASIDE
        try:
            self._make_room(aside)
            yield aside
        except (OSError, RuntimeError) as error:  # h5py raises both for failed writes
            with contextlib.suppress(OSError):
                aside.unlink(missing_ok=True)
            raise self._error(error, aside) from error

    def _make_room(self, aside: Path | None) -> None:
        """Make the folder, and let no link of that name lead to another file."""
        self.path.mkdir(0o700 if self._is_private else 0o777, parents=True, exist_ok=True)
        if not self._is_ours():
            raise PermissionError(errno.EACCES, "Others may read or write there", str(self.path))
        if aside is not None and os.path.lexists(aside):
            aside.unlink()

    def _is_ours(self) -> bool:
        """Tell whether the folder is there and, if it is private, nobody else's."""
        if not self._is_private or not os.path.lexists(self.path):
            return self.path.exists()
        about = self.path.lstat()
        is_own = stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid()
        return is_own and not about.st_mode & 0o077

    def _complete(self, aside: Path, name: str) -> None:
        """Give a written backup its name, and remove those that are not kept."""
        path, present = self.path / name, self._found()
        aside.rename(path)
        _to_disk(self.path)
        self._whole = [*self._whole, path][-self._num_kept :]
        for earlier, _ in present.values():
            is_kept = earlier in self._whole or earlier in self._left_alone
            if not is_kept and not earlier.is_dir():
                earlier.unlink(missing_ok=True)

    def _error(self, error: Exception, path: Path) -> OSError:
        return OSError(
            f"The backup could not be written. Received: {error}, for {path}. The backup before "
            f"it is as it was: {self.newest}. Check free space and permissions there, and start "
            "again."
        )

    def _other_model_error(self, problem: str) -> ValueError:
        return ValueError(
            f"The backup {self.newest} is that of another model. Received: {problem}. Train the "
            "model with which it was written, or give another backup_dir."
        )

    def _found(self) -> dict[int, tuple[Path, str]]:
        """Path and hash of each backup by its number; the newest has the largest."""
        paths = self.path.iterdir() if self._is_ours() else ()
        names = (_NAME.fullmatch(path.name) for path in paths)
        return {int(name[1]): (self.path / name[0], name[2]) for name in names if name}

    def _refuse_other_formats(self) -> None:
        for path in (self.path / name for name in _OTHER_FORMATS):
            if path.exists():
                raise ValueError(
                    "A backup of keras.callbacks.BackupAndRestore, or of an earlier version of "
                    "this one, does not tie its weights to a place in the data. Received: "
                    f"{path}. Give another backup_dir, or remove the files of that backup; "
                    "model.load_weights reads the weights alone."
                )


def memory_folder(run: str, backup_dir: str | Path) -> Path:
    """A folder in this machine's memory for the backups of a run."""
    digest = hashlib.sha256(str(Path(backup_dir).absolute()).encode()).hexdigest()
    return _memory() / f"{_memory_prefix(run)}{digest[:8]}"


def remove_memory_folders(run: str) -> None:
    """Remove what a run that has ended left in this machine's memory."""
    for folder in _memory().glob(f"{_memory_prefix(run)}*"):
        shutil.rmtree(folder, ignore_errors=True)


def remove_other_runs(memory: Path) -> None:
    """Remove what runs that were killed left in this machine's memory for the same backups."""
    digest = memory.name.rpartition("-")[2]
    for folder in _memory().glob(f"{_memory_prefix('*')}{digest}"):
        if folder != memory:
            shutil.rmtree(folder, ignore_errors=True)


def _memory() -> Path:
    return _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())


def _memory_prefix(run: str) -> str:
    return f"keras_het-{os.getuid()}-{run}-"


def _seeds(model: keras.Model) -> list[keras.Variable]:
    """The states of a model's random generators, which Keras does not save with the weights."""
    weights = {id(weight) for weight in model.non_trainable_weights}
    return [each for each in model.non_trainable_variables if id(each) not in weights]


def _bytes_needed(model: keras.Model) -> int:
    optimizer = [] if model.optimizer is None else model.optimizer.variables
    variables = [*model.variables, *optimizer]
    sizes = (math.prod(each.shape) * each.value.dtype.size for each in variables)
    return sum(sizes) + _VARIABLE_BYTES * len(variables) + _FILE_BYTES


def _reserve(path: Path, num_bytes: int) -> None:
    """Reserve room on the disk first: without it HDF5 may end the process."""
    with path.open("wb") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
        except (AttributeError, OSError) as error:  # not supported by every system and file system
            if getattr(error, "errno", None) in _NO_ROOM:
                raise


def _to_disk(path: Path) -> None:
    """Wait until a file, or the names in a folder, would survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_whole(path: Path, sha256: str) -> bool:
    try:
        return path.is_file() and _sha256(path) == sha256
    except OSError:  # may not be read
        return False


def _sha256(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            found.update(chunk)
    return found.hexdigest()


def _listed(paths: list[Path]) -> str:
    return ", ".join(map(str, paths))
