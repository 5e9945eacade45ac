"""Program: trains with a BatchBalancer while an emulated device slows down and recovers.

Arguments: folder for the results; factor of the slow-down of replica 0 in the middle third.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from reads_of_devices import Reads
from recorded import arrays
from recording import small_model

import keras_het
from keras_het.strategy.measure import emulated_device

BATCH = 40
STEPS = 240


class SlowDown(keras.callbacks.Callback):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self._factor = factor
        self._step = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._step += 1
        if self._step == STEPS // 3:
            emulated_device.slow_down(0, self._factor)
        if self._step == 2 * STEPS // 3:
            emulated_device.slow_down(0, 1.0)


def main() -> None:
    folder, factor = Path(sys.argv[1]), float(sys.argv[2])
    cpu = tf.config.list_physical_devices("CPU")[0]
    parts = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(cpu, parts)
    strategy = keras_het.HeterogeneousStrategy(devices=["CPU:1"])
    reads = Reads()
    keras.utils.set_random_seed(7)
    with strategy.scope():
        model = small_model(keras.optimizers.SGD(0.01, momentum=0.9))
    balancer = keras_het.callbacks.BatchBalancer("min_max" if strategy.num_workers > 1 else "even")
    x, y = arrays(BATCH * STEPS // 2)
    model.fit(
        x, y, batch_size=BATCH, epochs=2, verbose=0, callbacks=[balancer, SlowDown(factor), reads]
    )
    name = f"worker_{strategy.worker_index}" if strategy.num_workers > 1 else "single"
    np.savez(folder / f"{name}.npz", *[np.array(weight) for weight in model.weights])
    if strategy.num_workers > 1:
        report = {**balancer.to_dict(), "read_in_plain_steps": reads.in_plain_steps}
        (folder / f"{name}.json").write_text(json.dumps(report))


main()
