"""Program: trains with a BatchBalancer; worker 1 is fast, has little memory and counts its bytes.

Arguments: micro_batch_size ("auto" or "None"); folder for the shares and for the largest part.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from recorded import arrays

import keras_het
from keras_het.strategy.measure import memory_use

SIZE, FOLDER = None if sys.argv[1] == "None" else sys.argv[1], Path(sys.argv[2])
RESIDENT, EACH, LIMIT = 1000, 100, 4000  # 26 samples fit into nine tenths, 30 into all
largest = 0


@keras.saving.register_keras_serializable()
class Memory(keras.layers.Layer):
    """Runs out of memory as TensorFlow reports it."""

    def call(self, inputs):  # type: ignore[no-untyped-def]
        context = tf.distribute.get_replica_context()
        if context is None:  # while the model is built
            return inputs
        place = [inputs, context.replica_id_in_sync_group]
        checked = tf.numpy_function(self.check, place, tf.float32)
        return tf.ensure_shape(checked, inputs.shape)

    @staticmethod
    def check(values: np.ndarray, replica: int) -> np.ndarray:
        global largest
        if replica == 1:
            largest = max(largest, len(values))
            if RESIDENT + EACH * largest > LIMIT:
                raise MemoryError("OOM when allocating tensor")
        return values


def main() -> None:
    strategy = keras_het.HeterogeneousStrategy(micro_batch_size=SIZE)
    worker = strategy.layout.local_replicas.start

    def memory_of(device: str) -> memory_use.Memory | None:
        peak = RESIDENT + EACH * largest
        return memory_use.Memory(RESIDENT, peak, LIMIT) if worker == 1 else None

    memory_use.memory_of = memory_of
    with strategy.scope():
        model = keras.Sequential([keras.Input((5,)), Memory(), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    balancer = keras_het.callbacks.BatchBalancer()
    x, y = arrays(1600)
    model.fit(x, y, batch_size=40, epochs=2, shuffle=False, verbose=0, callbacks=[balancer])
    shares = [row["shares"][1] for row in balancer.measurements]
    result = {"shares": shares, "largest": largest, "summary": balancer.summary()}
    (FOLDER / f"worker_{worker}.json").write_text(json.dumps(result))


main()
