"""Program: worker 1 leaves what the others are in; its argument says what.

"barrier", or a loop: "stop" (by `model.stop_training`), "fit" or "predict" (its data end).
"""

from __future__ import annotations

import sys
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import keras_het
from keras_het.strategy.cluster import agreement, stop_signals

SAMPLES = 64


class Stop(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.stop_training = strategy.worker_index == 1 and batch == 3


case = sys.argv[1]
if case == "barrier":
    stop_signals._LONGEST_WAIT_SECONDS = 1.0
else:
    agreement.PATIENCE_SECONDS = 3.0
strategy = keras_het.HeterogeneousStrategy()
if case == "barrier":
    if strategy.worker_index == 1:
        sys.exit("no data")
    print("waiting", flush=True)
    strategy.barrier()
    print("continued", flush=True)
# filtered: nobody can know how many batches there are
most = SAMPLES // 2 if strategy.worker_index == 1 and case != "stop" else SAMPLES
data = tf.data.Dataset.range(SAMPLES).filter(lambda number: number < most)
data = data.map(lambda number: (tf.ones([5]), tf.cast(number, tf.float32)[None])).batch(8)
with strategy.scope():
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
if case == "predict":
    model.predict(data, verbose=0)
else:
    model.fit(data, epochs=3, verbose=0, callbacks=[Stop()] if case == "stop" else [])
print("finished", np.array(model.optimizer.iterations), flush=True)
