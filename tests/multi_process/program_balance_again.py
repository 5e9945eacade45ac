"""Program: trains with a BatchBalancer from a backup, as a machine that the environment names.

Arguments: folder for the backup and the results; a step after which it fails, 0 for none.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import keras
from recorded import arrays
from recording import small_model

import keras_het

BATCH, STEPS = 40, 20


class Fails(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch + 1 == int(sys.argv[2]):
            raise InterruptedError("the power went out")


def main() -> None:
    folder, name = Path(sys.argv[1]), os.environ["NAME_OF_MACHINE"]
    platform.node = lambda: name
    strategy = keras_het.HeterogeneousStrategy(devices=["CPU:0"])
    keras.utils.set_random_seed(7)
    with strategy.scope():
        model = small_model(keras.optimizers.SGD(0.01))
    balancer = keras_het.callbacks.BatchBalancer()
    backup = keras_het.callbacks.BackupAndRestore(
        folder / "backup", save_freq=1, delete_checkpoint=False
    )
    try:
        x, y = arrays(BATCH * STEPS)
        callbacks = [balancer, backup, Fails()]
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=callbacks)
    finally:
        (folder / f"{name}.json").write_text(json.dumps(balancer.to_dict()))


main()
