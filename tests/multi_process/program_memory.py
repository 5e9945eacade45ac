"""Program: trains with a BatchBalancer; one replica's memory holds only a small share.

Arguments: folder that remembers; replica; most samples that it holds; file for the shares.
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

FOLDER, REPLICA, MOST, RESULT = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]


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
        if replica == REPLICA and len(values) > MOST:
            raise MemoryError("OOM when allocating tensor")
        return values


def main() -> None:
    strategy = keras_het.HeterogeneousStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((5,)), Memory(), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    balancer = keras_het.callbacks.BatchBalancer(memory_directory=FOLDER)
    x, y = arrays(200)
    model.fit(x, y, batch_size=20, epochs=1, shuffle=False, verbose=0, callbacks=[balancer])
    Path(RESULT).write_text(json.dumps([row["shares"] for row in balancer.measurements]))


main()
