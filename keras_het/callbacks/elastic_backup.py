"""Backups for a training whose workers are replaced while it continues."""

from __future__ import annotations

import io
import json
import logging
import os
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keras_het.callbacks.backup_and_restore import BackupAndRestore
from keras_het.fit.backup_folder import RUN, BackupFolder, memory_folder, remove_other_runs
from keras_het.fit.model_strategy import tell
from keras_het.fit.resume import AUTO
from keras_het.stability import experimental
from keras_het.strategy.cluster.agreement import exchange, exchange_bytes

if TYPE_CHECKING:
    from keras_het.strategy.heterogeneous_strategy import HeterogeneousStrategy

_logger = logging.getLogger(__name__)

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
        found, damage = [(_NONE, self._folder)], None
        for folder in (self._memory, self._folder):
            try:
                found.append((_newest_of(folder, self._run), folder))
            except OSError as found_damage:
                damage = found_damage
        training = max(found, key=lambda each: each[0]["age"])[0]["training"]
        same = [each for each in found if each[0]["training"] == training]
        best, folder = max(same, key=lambda each: each[0]["number"])
        own = {
            **best,
            "latest": max(self._memory.number, self._folder.number),
            "failed": error is not None,
            "is_damaged": damage is not None,
            "host": socket.gethostname(),
        }
        gather, index = strategy.extended.gather_over_workers, strategy.worker_index
        everyone = exchange(gather, own)
        # the present training is that of this run, else the one that was saved last
        present = max(everyone, key=lambda each: each["age"])["training"]
        holder = max(everyone, key=lambda each: each["training"] == present and each["number"])
        has_backup = holder["number"] > 0
        for about, other in found:
            if about["number"] and about["training"] != present:
                self._folder.leave(other.newest)
                _logger.warning("Ignored: %s, which belongs to another training.", other.newest)
        fatal = [each["failed"] or (each["is_damaged"] and not has_backup) for each in everyone]
        if fatal[index]:
            raise error or damage or OSError()
        if any(fatal):
            raise OSError(
                f"The backups in {self._folder.path} cannot be used. Received: an error on worker "
                f"{fatal.index(True)}: see its own output, which names the file. Fix it there, "
                "and start again."
            )
        if damage is not None:
            _logger.warning("Continuing from another copy. %s", damage)
        is_first_of_host = own["host"] not in [each["host"] for each in everyone[:index]]
        self._keeps_memory = is_first_of_host and not strategy._holds_parts
        if is_first_of_host:
            remove_other_runs(self._memory.path)
        self._number = max(each["latest"] for each in everyone)
        if not has_backup:
            return BackupFolder(self._folder.path, num_kept=1)
        if all(each["name"] == holder["name"] for each in everyone):
            return folder
        rank = everyone.index(holder)
        content = folder.newest.read_bytes() if folder.newest and index == rank else b""
        content = exchange_bytes(gather, content)[rank]
        return folder if own["name"] == holder["name"] else self._keep(holder["name"], content)

    def _keep(self, name: str, content: bytes) -> BackupFolder:
        """Keep a backup that another worker has sent."""
        try:
            self._memory.adopt(name, io.BytesIO(content))
        except OSError as error:  # a container's memory may have little room
            self._memory = BackupFolder(tempfile.mkdtemp(prefix="keras_het-"), num_kept=1)
            _logger.warning("%s It is kept in %s.", error, self._memory.path)
            self._memory.adopt(name, io.BytesIO(content))
        return self._memory

    def _save(self, strategy: HeterogeneousStrategy) -> None:
        self._number += 1
        if not strategy.is_chief and not self._keeps_memory:
            return
        state, newest = self._state(self._position()), None
        if self._keeps_memory:
            try:
                self._memory.add(self.model, state, self._number)
                newest = self._memory.newest
            except OSError as error:
                self._keeps_memory = False
                _logger.warning("%s This machine keeps no backup in memory.", error)
        if not strategy.is_chief:
            return
        if newest is None:
            self._folder.add(self.model, state, self._number)
        else:
            with newest.open("rb") as content:
                self._folder.adopt(newest.name, content)
        tell(f"Saved {self._folder.newest}.", strategy, self._verbose)
        for listener in _listeners:
            listener(str(self._folder.path), self._epoch, self._step)

    def _state(self, position: Mapping[str, Any]) -> dict[str, Any]:
        about = {
            "finished_in": self._run if self._is_finished else None,
            "training": self._training,
            "run": self._run,
            "saved_at": int(time.time()),
        }
        return super()._state({**position, **about})


_NONE: dict[str, Any] = {"number": 0, "name": "", "training": "", "age": [False, 0, 0]}


def _newest_of(folder: BackupFolder, run: str) -> dict[str, Any]:
    """Return what workers compare of the newest backup; that of a finished run is none."""
    folder.find()
    position = {} if folder.newest is None else json.loads(str(folder.state()["position"]))
    if folder.newest is None or position.get("finished_in") not in (None, run):
        return _NONE
    return {
        "number": folder.number,
        "name": folder.newest.name,
        "training": position.get("training", ""),
        "age": [position.get("run") == run, position.get("saved_at", 0), folder.number],
    }
