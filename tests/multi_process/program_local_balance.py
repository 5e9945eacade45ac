"""Program: trains with local steps on emulated workers of different speed, and writes its samples.

Arguments: JSON with "folder", and further arguments of LocalTraining.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from recorded import arrays
from recording import small_model

import keras_het
from keras_het.callbacks import LocalTraining

BATCH, STEPS, EPOCHS = 40, 30, 2


class Samples(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.of_steps: list[int] = []
        self._before = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        now = self.model.distribute_strategy.local_samples_delivered
        self.of_steps.append(now - self._before)
        self._before = now

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        # after the validation, whose samples are delivered too
        self._before = self.model.distribute_strategy.local_samples_delivered


def main() -> None:
    options = json.loads(sys.argv[1])
    folder = Path(options.pop("folder"))
    strategy = keras_het.HeterogeneousStrategy()
    keras.utils.set_random_seed(7)
    with strategy.scope():
        model = small_model(keras.optimizers.SGD(0.01))
    x, y = arrays(BATCH * STEPS)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    samples = Samples()
    rule = {"class_name": "diloco", "config": options}
    callbacks = [LocalTraining(rule, balance=True), samples]
    model.fit(data, validation_data=data.take(2), epochs=EPOCHS, verbose=0, callbacks=callbacks)
    weights = np.concatenate([weight.ravel() for weight in model.get_weights()])
    np.savez(folder / f"{strategy.worker_index}.npz", samples=samples.of_steps, weights=weights)


main()
