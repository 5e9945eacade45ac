"""A layer whose device has little memory."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf


@keras.saving.register_keras_serializable()
class Memory(keras.layers.Layer):
    """Runs out of memory as TensorFlow reports it; a program says which parts a replica holds."""

    @staticmethod
    def holds(replica: int, samples: int) -> bool:
        raise NotImplementedError

    def call(self, inputs):  # type: ignore[no-untyped-def]
        context = tf.distribute.get_replica_context()
        if context is None:  # while the model is built
            return inputs
        place = [inputs, context.replica_id_in_sync_group]
        checked = tf.numpy_function(self.check, place, tf.float32)
        return tf.ensure_shape(checked, inputs.shape)

    def check(self, values: np.ndarray, replica: int) -> np.ndarray:
        if not self.holds(int(replica), len(values)):
            raise MemoryError("OOM when allocating tensor")
        return values
