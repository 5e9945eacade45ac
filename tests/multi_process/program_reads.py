"""Program: trains on a device that works ahead of its host, and writes in which steps it was read.

Arguments: folder for the results; JSON of the way to train: "callback" (its name), "options" of it,
"strategy" (of the strategy).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import keras
import tensorflow as tf
from reads_of_devices import Reads
from recorded import arrays
from recording import small_model

import keras_het

BATCH, STEPS = 8, 20


def main() -> None:
    folder, way = Path(sys.argv[1]), json.loads(sys.argv[2])
    cpu = tf.config.list_physical_devices("CPU")[0]
    parts = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(cpu, parts)
    strategy = keras_het.HeterogeneousStrategy(devices=["CPU:1"], **way.get("strategy", {}))
    keras.utils.set_random_seed(7)
    with strategy.scope():
        model = small_model(keras.optimizers.SGD(0.01))
    reads = Reads()
    callbacks: list[keras.callbacks.Callback] = [reads]
    if name := way.get("callback"):
        callbacks.insert(0, getattr(keras_het.callbacks, name)(**way.get("options", {})))
    x, y = arrays(BATCH * STEPS)
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=callbacks)
    is_async = strategy.is_async_worker
    name = f"async_{strategy.worker_index}" if is_async else f"worker_{strategy.worker_index}"
    report = {"reads": reads.in_plain_steps, "steps": reads.num_steps}
    (folder / f"{name}.json").write_text(json.dumps(report))


main()
