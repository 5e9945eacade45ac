"""Program: makes one strategy after the other, as folds and trials of a tuner do.

Arguments: the worker that is late, the number of strategies that it makes (the others make three),
`startup_timeout_seconds` of the later ones, and what happens in between: "saves" (by the chief) or
"drops" (each drops its strategy before it makes the next). Each trains a step under every other
strategy, and a model under none in between.
"""

from __future__ import annotations

import gc
import sys
import threading
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from recorded import arrays
from recording import small_model

import keras_het

LATE, MADE, SECONDS = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
BETWEEN = sys.argv[4:]


def fit(strategy: Any) -> None:
    x, y = arrays(8)
    with strategy.scope():
        model = small_model(keras.optimizers.SGD(0.1))
    model.fit(x, y, batch_size=8, epochs=1, verbose=0)
    if "saves" in BETWEEN and getattr(strategy, "is_chief", False):
        model.save("model.keras")
    print("trained to", float(np.sum([np.sum(each) for each in model.get_weights()])), flush=True)


def main() -> None:
    keras.utils.set_random_seed(3)
    strategy: Any = keras_het.HeterogeneousStrategy()
    is_late = strategy.worker_index == LATE
    for number in range(1, MADE if is_late else 3):
        if is_late:  # the others wait in the first collective of the next strategy
            threading.Event().wait(1.0)
        if "drops" in BETWEEN:
            strategy = None
            gc.collect()
        strategy = keras_het.HeterogeneousStrategy(startup_timeout_seconds=SECONDS)
        if number % 2:
            fit(strategy)
        fit(tf.distribute.OneDeviceStrategy("CPU:0"))
    if is_late and MADE < 3:
        threading.Event().wait(60.0)  # until the others have ended
    print("made all", flush=True)


main()
