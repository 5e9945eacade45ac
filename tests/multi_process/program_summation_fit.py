"""Program: trains with gradients summed by machines until something happens, or is such a machine.

Its single argument is the number of steps.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import keras_het
from keras_het.summation import machine


class SaysThatItTrains(keras.callbacks.Callback):
    step = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.step += 1
        if self.step == 20:
            print("training", flush=True)


def main() -> None:
    faulthandler.enable()
    if json.loads(os.environ["TF_CONFIG"])["task"]["type"] == "summation":
        machine.main()
        return
    strategy = keras_het.HeterogeneousStrategy(aggregation="summation")
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.arange(256, dtype="float32").reshape(64, 4) / 256
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).shuffle(64).repeat().batch(8)
    steps = int(sys.argv[1])
    model.fit(data, steps_per_epoch=steps, verbose=0, callbacks=[SaysThatItTrains()])


main()
