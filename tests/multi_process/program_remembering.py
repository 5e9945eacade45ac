"""Program: a worker whose callbacks remember what they have seen trains, or is killed on its way.

Its argument is a JSON object: "folder", "save_freq", "is_backup_first", "is_killed_last", and for
each hook at whose n-th call all workers are killed "killed_at": [name of the hook, n].
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
from pathlib import Path

import keras
from remembering import BATCH, VALIDATION, C, KillAt, X, Y, callbacks_in, fit

import keras_het


def main() -> None:
    options = json.loads(sys.argv[1])
    strategy = keras_het.HeterogeneousStrategy(share_weights=[3, 1])
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1), keras.layers.Dense(1)])
        metrics = ["mae", keras.metrics.MeanSquaredError()]
        model.compile(keras.optimizers.Adam(0.3), "mse", metrics=metrics)
        model.optimizer.build(model.trainable_variables)
    folder = Path(options["folder"])
    own = folder / str(strategy.worker_index)
    own.mkdir(parents=True, exist_ok=True)
    callbacks: list[C.Callback] = callbacks_in(own)
    if killed_at := options.get("killed_at"):
        place = len(callbacks) if options["is_killed_last"] else 0
        kill = functools.partial(os.kill, os.getpid(), signal.SIGKILL)
        callbacks.insert(place, KillAt(*killed_at, kill))
    if save_freq := options.get("save_freq"):
        place = 0 if options["is_backup_first"] else len(callbacks)
        backup = keras_het.callbacks.BackupAndRestore(folder / "backup", save_freq)
        callbacks.insert(place, backup)
    data = {"x": X, "y": Y, "batch_size": BATCH, "validation_data": VALIDATION}
    seen = fit(model, own, callbacks, data)
    seen["own"] = {
        name: sorted(value) if isinstance(value, set) else value
        for name, value in seen["own"].items()
    }
    lines = [f"{name}: {value!r}" for name, value in seen.items()]
    (own / "seen.txt").write_text("\n".join(lines))


main()
