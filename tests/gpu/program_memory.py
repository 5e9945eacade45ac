"""Program: trains on two parts of a GPU of which the second has little memory.

Argument: folder in which the balancer remembers. Prints the shares of the last step.
"""

from __future__ import annotations

import json
import sys

import keras
import numpy as np
import tensorflow as tf

import keras_het

gpu = tf.config.list_physical_devices("GPU")[0]
limits = [tf.config.LogicalDeviceConfiguration(memory_limit=size) for size in (6000, 300)]
tf.config.set_logical_device_configuration(gpu, limits)
strategy = keras_het.HeterogeneousStrategy(devices=["GPU:0", "GPU:1"])
with strategy.scope():
    # each sample keeps 3 activations of 1 MiB and their gradients
    layers = [keras.layers.Conv2D(64, 3, padding="same", activation="relu") for _ in range(3)]
    model = keras.Sequential([keras.Input([64, 64, 1]), *layers])
    model.compile("sgd", "mse")
x = np.zeros([1024, 64, 64, 1], "float32")
data = tf.data.Dataset.from_tensors((x, x)).repeat(3)
balancer = keras_het.callbacks.BatchBalancer("even", memory_dir=sys.argv[1])
model.fit(strategy.distribute(data), verbose=0, callbacks=[balancer])
print(json.dumps(balancer.measurements[-1]["shares"]))
