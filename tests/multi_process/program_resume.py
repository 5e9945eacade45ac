"""Program: trains with a backup, may be interrupted, and writes the weights it ends with.

Arguments: folder of the backup, with {} for the worker's index (empty: no backup); file for the
weights; step to be interrupted at (0: never); number of the save's file operation, counted from the
first save on, before which the chief is killed (0: never). Then, if wanted: a kind of input;
`save_freq`, with which every worker is killed after the step instead of an error in it. With the
kind "late" only the chief reads its backup at once.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from file_operations import Watch
from recorded import arrays
from recording import save_variables, small_model

import keras_het
from keras_het.fit.backup_folder import BackupFolder


class Interruption(keras.callbacks.Callback):
    def __init__(self, step: int, kills: bool) -> None:
        super().__init__()
        self._steps_left, self._kills = step, kills

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._steps_left -= 1
        if self._steps_left == 0:
            if self._kills:
                os.kill(os.getpid(), signal.SIGKILL)
            raise InterruptedError("the power went out")


def killed_at(operation: int, backup: str) -> Any:
    """A context in which the process is killed before a file operation below `backup`."""

    def look(number: int) -> None:
        if number == operation:
            print("killed before", watch.seen[-1], flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

    watch = Watch(Path(backup), look)
    return watch


def read_late() -> None:
    """Let this worker read its backup after the chief has deleted it, or has had the time to."""
    restore = BackupFolder.restore

    def late(folder: BackupFolder, model: keras.Model) -> Any:
        end = time.monotonic() + 3.0
        while folder.newest is not None and folder.newest.exists() and time.monotonic() < end:
            time.sleep(0.02)
        return restore(folder, model)

    BackupFolder.restore = late  # type: ignore[method-assign]


class Batches(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return tuple(part[8 * index : 8 * index + 8] for part in arrays(44))


def inputs(kind: str) -> dict[str, Any]:
    x, y = arrays(44)
    if kind == "arrays":
        return {"x": x, "y": y, "batch_size": 8, "validation_data": (x[:8], y[:8])}
    if kind == "PyDataset":
        return {"x": Batches(workers=2)}
    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(44, seed=3)
    if kind == "unknown size":
        data = data.filter(lambda *_: True)
    return {"x": data.batch(8)}


def main() -> None:
    backup, result, step, operation, *more = sys.argv[1:]
    kind, save_freq = more or ("data set", "2")
    strategy = keras_het.HeterogeneousStrategy()
    strategy.set_shares([2, 1, 1][: strategy.num_workers])
    backup = backup.format(strategy.worker_index)
    if kind == "late" and not strategy.is_chief:
        read_late()
    keras.utils.set_random_seed(7)
    with strategy.scope():
        model = small_model(keras.optimizers.SGD(0.1, momentum=0.9))
    callbacks: list[Any] = [Interruption(int(step), kills=bool(more))]
    if backup:
        every = int(save_freq) if save_freq.isdigit() else save_freq
        callbacks.insert(0, keras_het.callbacks.BackupAndRestore(backup, save_freq=every))
    with killed_at(int(operation) if strategy.is_chief else 0, backup):
        model.fit(**inputs(kind), epochs=3, verbose=0, callbacks=callbacks)
    if strategy.is_chief:
        save_variables(model, result)


main()
