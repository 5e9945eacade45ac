"""Program: worker 1 leaves what the others are in; its argument says what.

"barrier", or a loop: "stop" (by `model.stop_training`), "fit" or "predict" (its data end). In a
callback it reads "metrics" or "validation metrics", or calls "evaluate", "predict_on_batch",
"layers" (which it makes).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
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


class Alone(keras.callbacks.Callback):
    def __init__(self, method: str, act: Callable[[keras.Model], object]) -> None:
        super().__init__()
        self._act = act
        setattr(self, method, self._of_batch)

    def _of_batch(self, batch: int, logs: Any = None) -> None:
        if strategy.worker_index == 1 and batch == 3:
            self._act(self.model)


def read(model: keras.Model) -> None:
    float(model.metrics[0].variables[0])


def make_layers(model: keras.Model) -> None:
    with strategy.scope():
        keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])


case = sys.argv[1]
if case == "barrier":
    stop_signals._LONGEST_WAIT_SECONDS = 1.0
else:
    agreement.PATIENCE_SECONDS = agreement.SECONDS_BETWEEN_STEPS = 3.0
strategy = keras_het.HeterogeneousStrategy()
if case == "barrier":
    if strategy.worker_index == 1:
        sys.exit("no data")
    print("waiting", flush=True)
    strategy.barrier()
    print("continued", flush=True)
# filtered: nobody can know how many batches there are
most = SAMPLES // 2 if strategy.worker_index == 1 and case in ("fit", "predict") else SAMPLES
data = tf.data.Dataset.range(SAMPLES).filter(lambda number: number < most)
data = data.map(lambda number: (tf.ones([5]), tf.cast(number, tf.float32)[None])).batch(8)
with strategy.scope():
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
callbacks = {
    "stop": [Stop()],
    "metrics": [Alone("on_train_batch_end", read)],
    "validation metrics": [Alone("on_test_batch_end", read)],
    "evaluate": [Alone("on_train_batch_end", lambda model: model.evaluate(data, verbose=0))],
    "predict_on_batch": [
        Alone("on_train_batch_end", lambda model: model.predict_on_batch(np.ones([4, 5])))
    ],
    "layers": [Alone("on_train_batch_end", make_layers)],
}
if case == "predict":
    model.predict(data, verbose=0)
else:
    more = {"validation_data": data} if case == "validation metrics" else {}
    model.fit(data, epochs=3, verbose=0, callbacks=callbacks.get(case, []), **more)
print("finished", np.array(model.optimizer.iterations), flush=True)
