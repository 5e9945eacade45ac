"""Program: trains on noise with an adaptive global batch; writes what each worker did.

Argument: folder for the results.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import keras_het
from keras_het.callbacks import BackupAndRestore, BatchBalancer

SAMPLES = 480


def main() -> None:
    folder = Path(sys.argv[1])
    strategy = keras_het.HeterogeneousStrategy(shares=[2, 1])
    keras.utils.set_random_seed(7)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(1e-5), "mse")
    random = np.random.default_rng(0)
    x = random.normal(size=(SAMPLES, 4)).astype(np.float32)
    y = 1000 * random.normal(size=(SAMPLES, 1)).astype(np.float32)
    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(SAMPLES, seed=1).batch(12)
    balancer = BatchBalancer(global_batch="adaptive")
    backup = BackupAndRestore(str(folder / "backup"), delete_checkpoint=False)
    model.fit(data, epochs=4, verbose=0, callbacks=[balancer, backup])
    result = {
        "steps": [sum(row["shares"]) for row in balancer.measurements],
        "sizes": balancer.global_batch_sizes,
        "rate": float(keras.ops.convert_to_numpy(model.optimizer.learning_rate)),
        "weights": [np.array(weight).tolist() for weight in model.get_weights()],
    }
    (folder / f"worker_{strategy.worker_index}.json").write_text(json.dumps(result))


main()
