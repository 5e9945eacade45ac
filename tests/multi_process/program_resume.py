"""Program: trains with a backup, may be interrupted, and writes the weights it ends with.

Arguments: folder of the backup, with {} for the worker's index (empty: no backup); file for the
weights; step to be interrupted at (0: never); number of the save's file operation, counted from the
first save on, before which the chief is killed (0: never).
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from recorded import arrays
from recording import small_model

import keras_het

sys.path.append(str(Path(__file__).parents[1]))
from file_operations import Watch


class Interruption(keras.callbacks.Callback):
    def __init__(self, step: int) -> None:
        super().__init__()
        self._steps_left = step

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._steps_left -= 1
        if self._steps_left == 0:
            raise InterruptedError("the power went out")


def killed_at(operation: int, backup: str) -> Any:
    """A context in which the process is killed before a file operation below `backup`."""

    def look(number: int) -> None:
        if number == operation:
            print("killed before", watch.seen[-1], flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

    watch = Watch(Path(backup), look)
    return watch


def main() -> None:
    backup, result, step, operation = sys.argv[1:]
    strategy = keras_het.HeterogeneousStrategy(shares=[2, 1] if "TF_CONFIG" in os.environ else None)
    backup = backup.format(strategy.worker_index)
    keras.utils.set_random_seed(7)
    with strategy.scope():
        model = small_model(keras.optimizers.SGD(0.1, momentum=0.9))
    callbacks: list[Any] = [Interruption(int(step))]
    if backup:
        callbacks.insert(0, keras_het.callbacks.BackupAndRestore(backup, save_freq=2))
    data = tf.data.Dataset.from_tensor_slices(arrays(44)).shuffle(44, seed=3).batch(8)
    with killed_at(int(operation) if strategy.is_chief else 0, backup):
        model.fit(data, epochs=3, verbose=0, callbacks=callbacks)
    if strategy.is_chief:
        variables = [*model.weights, *model.optimizer.variables]
        values = {f"variable_{position}": np.array(v) for position, v in enumerate(variables)}
        np.savez(Path(result), **values)


main()
