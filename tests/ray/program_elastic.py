"""A training on several Ray nodes of this machine, which a test disturbs.

Each sample has an input of its own to a layer whose gradient counts how often it was used.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

NUM_SAMPLES, BATCH = 240, 24
RATE = 0.1


def train(config: dict[str, Any]) -> None:
    import keras
    import numpy as np

    import keras_het

    folder = Path(config["folder"])
    keras.utils.set_random_seed(0)
    strategy = keras_het.HeterogeneousStrategy() if config["is_distributed"] else None
    generator = np.random.default_rng(0)
    features = generator.normal(size=(NUM_SAMPLES, 4)).astype(np.float32)
    target = np.sin(features[:, :1])
    with strategy.scope() if strategy else keras.name_scope("alone"):
        which, given = keras.Input((NUM_SAMPLES,)), keras.Input((4,))
        count = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", name="count")(
            which
        )
        hidden = keras.layers.Dropout(0.1)(keras.layers.Dense(8, "tanh")(given))
        model = keras.Model([which, given], [count, keras.layers.Dense(1, name="out")(hidden)])
        model.compile(
            keras.optimizers.SGD(RATE, momentum=0.0),
            loss=[lambda y, p: keras.ops.mean(p, -1), "mse"],
        )

    class Watched(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if strategy is None:
                return
            time.sleep(config["seconds"])
            step = int(self.model.optimizer.iterations.numpy())
            text = json.dumps([os.getpid(), strategy.num_workers, step, time.time()])
            with (folder / f"steps-{strategy.worker_index}").open("a") as file:
                file.write(text + "\n")
            if step == config.get("fails_at") and strategy.worker_index == 1:
                raise KeyError("a mistake of the script")

    callbacks: list[keras.callbacks.Callback] = [Watched()]
    if strategy:
        if not (folder / "began").exists() and strategy.is_chief:
            (folder / "began").write_text(str(time.time()))
        callbacks.insert(0, keras_het.callbacks.Elastic(str(folder / "backup"), save_freq=3))
    model.fit(
        [np.eye(NUM_SAMPLES, dtype=np.float32), features],
        [target, target],
        batch_size=BATCH,
        epochs=config["epochs"],
        verbose=0,
        callbacks=callbacks,
    )
    if strategy is None or strategy.is_chief:
        aside = folder / "weights.npz.tmp"
        with aside.open("wb") as file:
            np.savez(file, *model.get_weights())
        aside.rename(folder / "weights.npz")


if __name__ == "__main__":
    train(json.loads(sys.argv[1]))
