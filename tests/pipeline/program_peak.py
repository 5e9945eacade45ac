"""Program: trains eight blocks in a pipeline, and prints the growth of its peak memory, in bytes.

Arguments: "never" or "always" to recompute; number of stages.
"""

import resource
import sys

import keras
import numpy as np
import tensorflow as tf

import keras_het

L = keras.layers
BLOCKS, WIDTH, SIZE, ROWS, MICRO_BATCHES = 8, 24, 32, 192, 8


def peak():
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class AtFirstStep(keras.callbacks.Callback):
    """Looks when the step is traced, before it runs."""

    def __init__(self):
        super().__init__()
        self.before = 0

    def on_train_batch_begin(self, batch, logs=None):
        self.before = self.before or peak()


def main():
    recompute, stages = sys.argv[1], int(sys.argv[2])
    cpu = tf.config.list_physical_devices("CPU")[0]
    logical = [tf.config.LogicalDeviceConfiguration()] * stages
    tf.config.set_logical_device_configuration(cpu, logical)
    cuts = [f"normal_{BLOCKS * i // stages - 1}" for i in range(1, stages)]
    strategy = keras_het.PipelineStrategy(cuts, MICRO_BATCHES, recompute=recompute)
    layers = [keras.Input([SIZE, SIZE, WIDTH])]
    for i in range(BLOCKS):
        layers += [L.Conv2D(WIDTH, 3, padding="same"), L.Activation("tanh")]
        layers.append(L.LayerNormalization(name=f"normal_{i}"))
    with strategy.scope():
        model = keras.Sequential([*layers, L.GlobalAveragePooling2D(), L.Dense(10)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss, jit_compile=False)
    data = tf.data.Dataset.from_tensors(
        (np.ones([ROWS, SIZE, SIZE, WIDTH], "float32"), np.zeros([ROWS], "int32"))
    ).repeat(2)
    callback = AtFirstStep()
    model.fit(data, verbose=0, callbacks=[callback])
    print("grown by", peak() - callback.before)


main()
