"""Backups for a training whose workers are replaced while it continues."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import logging
import math
import os
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from keras_het.callbacks.backup_and_restore import BackupAndRestore
from keras_het.fit.backup_folder import RUN, BackupFolder, memory_folder, remove_other_runs
from keras_het.fit.model_strategy import tell
from keras_het.fit.resume import AUTO
from keras_het.stability import experimental

if TYPE_CHECKING:
    from keras_het.strategy.heterogeneous_strategy import HeterogeneousStrategy

_logger = logging.getLogger(__name__)

_WORDS_AT_ONCE = 2**21
_BYTES_PER_WORD = 8
_listeners: list[Callable[[str, int, int], None]] = []
_used_folders: set[Path] = set()
"""Of what this process has trained to its end."""


def when_saved(listener: Callable[[str, int, int], None]) -> None:
    """Call a function on the chief after each backup, with its folder, epoch and step."""
    _listeners.append(listener)


@experimental
class ElasticBackup(BackupAndRestore):
    """`BackupAndRestore` for workers that are lost, replaced and added while a training continues.

    Where an engine such as `keras_het.ray.KerasTrainer` starts the workers again, each machine also
    keeps the newest backup in its memory. A new group of workers continues from the newest backup
    that one of them has, on disk or in memory: `backup_dir` need not be shared, and may be lost
    with the chief's machine. Backups of another training, which a machine may still have from an
    earlier run, are left alone. The backup of a finished `fit` stays until the next run, so that
    the loss of a worker after it does not begin it again; each `fit` of a script needs its own
    folder.

    Args:
        backup_dir: folder of the backup.
        save_freq: as of `BackupAndRestore`.
        verbose: 1 prints each backup, and the point at which a training resumes, on the chief.
        **kwargs: further arguments of `BackupAndRestore`.

    Raises:
        ValueError: as `BackupAndRestore`, but workers may find different backups; or if an earlier
            `fit` of this process has used the folder.
        OSError: if the only backup is damaged, or a backup cannot be written.
    """

    def __init__(
        self, backup_dir: str, save_freq: str | int = AUTO, *, verbose: int = 0, **kwargs: Any
    ) -> None:
        super().__init__(backup_dir, save_freq, verbose=verbose, **kwargs)
        self._run = os.environ.get(RUN)
        memory = memory_folder(self._run or "", backup_dir)
        self._memory = BackupFolder(memory, num_kept=1, is_private=True)
        self._keeps_memory = self._is_finished = False
        # of the newest backup of all workers
        self._number = 0
        # the name of the run that began this training
        self._training = self._run or ""

    def on_train_begin(self, logs: Mapping[str, float] | None = None) -> None:
        """Restore the newest backup that one of the workers has."""
        self._keeps_memory = self._is_finished = False
        super().on_train_begin(logs)

    def _restore(self, strategy: HeterogeneousStrategy, folder: BackupFolder) -> None:
        super()._restore(strategy, folder)
        position = json.loads(str(folder.state()["position"]))
        self._training = position.get("training", self._training)

    def on_train_end(self, logs: Mapping[str, float] | None = None) -> None:
        """Keep the backup of a finished `fit` if its workers may start again."""
        if self._run is not None and not self._strategy().is_async_worker:
            self._is_finished, self.delete_checkpoint = True, False
            self._epoch = self.params["epochs"]  # also if another callback has ended it before
            self._save_model()
            _used_folders.add(self._folder.path.absolute())
        super().on_train_end(logs)

    def _find_backup(self, strategy: HeterogeneousStrategy) -> BackupFolder:
        if self._run is None:
            return super()._find_backup(strategy)
        if self._folder.path.absolute() in _used_folders:
            raise ValueError(
                "An earlier fit of this script has used this backup_dir: after a loss the script "
                "runs again from the top, and each fit looks for its own backup. Received: "
                f"backup_dir={self._folder.path}. Give each fit its own folder."
            )
        error = self._lock_folder(strategy)
        found, damage = [_Found(self._folder)], None
        for folder in (self._memory, self._folder):
            try:
                found.append(_find(folder, self._run))
            except OSError as found_damage:
                damage = found_damage
        best = max(found, key=lambda each: (each.is_of_run, each.saved_at))
        same = [each for each in found if each.training == best.training and each.number]
        best = max(same, key=lambda each: each.number, default=best)
        number, own = best.number, best.folder
        path = own.newest if number else None
        row = [
            number,
            max(self._memory.number, self._folder.number),
            error is not None,
            damage is not None,
            _as_number(hashlib.sha256(socket.gethostname().encode()).hexdigest()),
            _as_number(path.name.split("-")[2]) if path else 0,
            path.stat().st_size if path else 0,
            _name_of(best),
            best.is_of_run,
            best.saved_at,
        ]
        everyone = strategy.extended.gather_over_workers(np.array([row], np.int64))
        numbers, latest, errors, damages, hosts, hashes, sizes, trainings, *ages = everyone.T
        # the present training is that of this run, else the one that was saved last
        present = trainings[np.lexsort((numbers, ages[1], ages[0]))[-1]]
        numbers = np.where(trainings == present, numbers, 0)
        index, holder = strategy.worker_index, int(numbers.argmax())
        for other in (each for each in found if each.number and _name_of(each) != present):
            self._folder.leave(other.folder.newest)
            _logger.warning("Ignored: %s, which belongs to another training.", other.folder.newest)
        fatal = errors if numbers[holder] else errors + damages
        if fatal[index]:
            raise error or damage or OSError()
        if fatal.any():
            raise OSError(
                f"The backups in {self._folder.path} cannot be used. Received: an error on worker "
                f"{int(fatal.argmax())}: see its own output, which names the file. Fix it there, "
                "and start again."
            )
        if damage is not None:
            _logger.warning("Continuing from another copy. %s", damage)
        is_first_of_host = hosts.tolist().index(hosts[index]) == index
        self._keeps_memory = is_first_of_host and not strategy._holds_parts
        if is_first_of_host:
            remove_other_runs(self._memory.path)
        self._number = int(latest.max())
        if not numbers[holder]:
            return BackupFolder(self._folder.path, num_kept=1)
        if (hashes == hashes[holder]).all():
            return own
        content = path.read_bytes() if path and index == holder else b""
        content = _send(strategy, content, int(sizes[holder]))
        return own if hashes[index] == hashes[holder] else self._keep(int(numbers[holder]), content)

    def _keep(self, number: int, content: bytes) -> BackupFolder:
        """Keep a backup that another worker has sent."""
        name = f"backup-{number}-{hashlib.sha256(content).hexdigest()}.weights.h5"
        try:
            self._memory.adopt(name, io.BytesIO(content))
        except OSError as error:  # a container's memory may have little room
            self._memory = BackupFolder(tempfile.mkdtemp(prefix="keras_het-"), num_kept=1)
            _logger.warning("%s It is kept in %s.", error, self._memory.path)
            self._memory.adopt(name, io.BytesIO(content))
        return self._memory

    def _save(self, strategy: HeterogeneousStrategy) -> None:
        if strategy.is_chief or self._keeps_memory:
            self._write(self._position())
        if strategy.is_chief:
            tell(f"Saved {self._folder.newest}.", strategy, self._verbose)
            for listener in _listeners:
                listener(str(self._folder.path), self._epoch, self._step)
        self._number += 1

    def _write(
        self, position: Mapping[str, Any], is_valid: Callable[[], bool] = lambda: True
    ) -> bool:
        state, number = self._state_of(position), self._number + 1
        if self._keeps_memory:
            try:
                if not self._memory.add(self.model, state, is_valid, number):
                    return False
            except OSError as error:
                self._keeps_memory = False
                _logger.warning("%s This machine keeps no backup in memory.", error)
        if not self._strategy().is_chief:
            return True
        if not self._keeps_memory or self._memory.newest is None:
            return self._folder.add(self.model, state, is_valid, number)
        with self._memory.newest.open("rb") as content:
            self._folder.adopt(self._memory.newest.name, content)
        return True

    def _state_of(self, position: Mapping[str, Any]) -> dict[str, Any]:
        finished_in = self._run if self._is_finished else None
        about = {
            "finished_in": finished_in,
            "training": self._training,
            "run": self._run,
            "saved_at": int(time.time()),
        }
        return super()._state_of({**position, **about})


@dataclasses.dataclass(frozen=True)
class _Found:
    """The newest backup of a folder, with number 0 if training cannot continue from it."""

    folder: BackupFolder
    number: int = 0
    training: str = ""
    is_of_run: bool = False
    saved_at: int = 0


def _find(folder: BackupFolder, run: str) -> _Found:
    """Find a folder's newest backup; that of an earlier, finished run is none."""
    folder.find()
    if folder.newest is None:
        return _Found(folder)
    position = json.loads(str(folder.state()["position"]))
    if position.get("finished_in") not in (None, run):
        return _Found(folder)
    training, saved_at = position.get("training", ""), position.get("saved_at", 0)
    return _Found(folder, folder.number, training, position.get("run") == run, saved_at)


def _name_of(found: _Found) -> int:
    return _as_number(hashlib.sha256(found.training.encode()).hexdigest())


def _as_number(sha256: str) -> int:
    """Return the part of a hash that workers can compare as a number."""
    return int(sha256[: 2 * _BYTES_PER_WORD - 2], 16)


def _send(strategy: HeterogeneousStrategy, content: bytes, num_bytes: int) -> bytes:
    """Give all workers what one of them has, in parts; the others pass nothing."""
    words = np.frombuffer(content + bytes(-len(content) % _BYTES_PER_WORD), np.int64)
    parts = [
        strategy.extended.gather_over_workers(words[start : start + _WORDS_AT_ONCE])
        for start in range(0, math.ceil(num_bytes / _BYTES_PER_WORD), _WORDS_AT_ONCE)
    ]
    return np.concatenate(parts).tobytes()[:num_bytes]
