"""Backups from which all workers go on at the right sample."""

from __future__ import annotations

import contextlib
import json
import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_het.callbacks.model_strategy import heterogeneous_strategy


class BackupAndRestore(keras.callbacks.BackupAndRestore):
    """`keras.callbacks.BackupAndRestore` that continues in the middle of an epoch.

    Keras saves after `save_freq` batches but starts the interrupted epoch from its first batch, so
    that the samples before the backup are used twice. This one also tells the data path where the
    backup was made: shuffles continue in the same order, and the epoch goes on with the next global
    batch. Only the chief writes; every worker reads, so `backup_dir` is a path that all share.

    The metrics of the interrupted epoch are those of its second part.

    Args:
        backup_dir: directory of the backup, the same for all workers.
        save_freq: "epoch", or the number of batches between two backups.
        **kwargs: further arguments of `keras.callbacks.BackupAndRestore`.

    Raises:
        ValueError: if the model does not train under a `HeterogeneousStrategy`.

    Reference: `keras.callbacks.BackupAndRestore`.
    """

    def __init__(self, backup_dir: str, save_freq: str | int = "epoch", **kwargs: Any) -> None:
        super().__init__(str(backup_dir), save_freq=save_freq, **kwargs)
        self._position_path = Path(backup_dir) / "data_position.json"
        self._service_path = Path(backup_dir) / "service.npz"
        self._epoch = 0
        self._first_step = 0
        self._step = 0
        self._data: Any = None
        self._quiet_epoch: contextlib.ExitStack | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Restores weights, optimizer, epoch and place in the data."""
        super().on_train_begin(logs)
        if not self._position_path.exists():
            return
        self._restore_service()
        position = json.loads(self._position_path.read_text())
        self._epoch, self._first_step = position["epoch"], position["step"]
        num_steps = self.params.get("steps")
        if num_steps and self._first_step >= num_steps:
            self._epoch, self._first_step = self._epoch + 1, 0
        self.model._initial_epoch = self._epoch
        strategy = self._strategy()
        size = position.get("global_batch_size")
        if size and size != getattr(strategy.iterated_data, "global_batch_size", size):
            strategy.iterated_data.set_global_batch_size(size)
        strategy.resume_data(position["passes"], position["pass_step"])

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Notes where the epoch starts."""
        super().on_epoch_begin(epoch, logs)
        if epoch != self._epoch:
            self._epoch, self._first_step = epoch, 0
        self._step = self._first_step
        if self._first_step:
            # The rest of an epoch is shorter than Keras expects; that is no lack of data.
            self._quiet_epoch = contextlib.ExitStack()
            self._quiet_epoch.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message="Your input ran out of data")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Saves every `save_freq` batches."""
        self._step = self._first_step + batch + 1
        self._data = self._strategy().iterated_data
        super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Saves after the epoch, if `save_freq` is "epoch"."""
        if self._quiet_epoch is not None:
            self._quiet_epoch.close()
            self._quiet_epoch = None
            if self._data is not None and self._data.cardinality >= 0:
                # After a whole epoch Keras makes an iterator that it does not use, which moves
                # shuffles on; after this shorter one it did not.
                iter(self._data)
        self._epoch, self._first_step, self._step = epoch + 1, 0, 0
        super().on_epoch_end(epoch, logs)

    def _save_model(self) -> None:
        super()._save_model()
        if not self._strategy().is_chief:
            return
        temporary = self._position_path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self._position()))
        # A process killed in between leaves the old position or the new one, never half of it.
        temporary.replace(self._position_path)
        self._save_service(self._strategy().service_state)

    def _save_service(self, state: Any) -> None:
        """Keeps the versions and the rule's state of a parameter service in this process."""
        if state is not None:
            temporary = self._service_path.with_name("service.tmp.npz")
            np.savez(temporary, **state())
            temporary.replace(self._service_path)

    def _restore_service(self) -> None:
        if self._service_path.exists():
            with np.load(self._service_path) as arrays:
                self._strategy().restored_service_state = {name: arrays[name] for name in arrays}

    def _position(self) -> dict[str, Any]:
        passes, pass_step = ((), 0) if self._data is None else self._data.position
        if self._strategy().num_async_workers:
            # who took which batches of an epoch is not kept: it starts again from its beginning
            return {"epoch": self._epoch, "step": 0, "passes": passes, "pass_step": 0}
        if self._step and self._step == self.params.get("steps") and not pass_step:
            # Keras has yet to start the iterator that it does not use at the end of an epoch
            passes = (*passes, False)
        return {
            "epoch": self._epoch,
            "step": self._step,
            "passes": passes,
            "pass_step": pass_step,
            "global_batch_size": getattr(self._data, "global_batch_size", None),
        }

    def _strategy(self) -> Any:
        return heterogeneous_strategy(self.model, self)
