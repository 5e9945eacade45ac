"""Program: trains with roles="auto" and writes what each task did.

Arguments: folder; JSON of link rates that stand in for measured ones, [] to measure.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import keras_het
from keras_het.asynchronous.exchange import role_choice
from keras_het.asynchronous.exchange.role_choice import ExchangeTimes
from keras_het.strategy.cluster.cluster_config import CHOSEN_ROLES

EPOCHS = 20  # as long as a process takes to start again in another role


def main() -> None:
    rates = json.loads(sys.argv[2])
    if rates:
        role_choice.measure_link_rates = lambda strategy: tuple(rates)
        # what three processes on few cores measure depends on what else runs
        times = ExchangeTimes(all_reduce_seconds=0.008, busy_seconds=0.004)
        role_choice.measure_exchange = lambda *_: times
    strategy = keras_het.HeterogeneousStrategy()
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01), "mse")
    random = np.random.default_rng(1)
    x = random.normal(size=(480, 4)).astype(np.float32)
    data = tf.data.Dataset.from_tensor_slices((x, x.sum(axis=1, keepdims=True))).batch(24)
    hybrid = keras_het.callbacks.AsyncWorkers(
        "async_easgd", roles="auto", profile_steps=6, period=2, timeout_seconds=60
    )
    history = model.fit(data, epochs=EPOCHS, verbose=0, callbacks=[hybrid])
    config = strategy.extended.cluster_config
    result = {
        "pid": os.getpid(),
        "cluster": config.as_cluster_dict(),
        "task": [config.task_type, config.task_index],
        "chosen": os.environ.get(CHOSEN_ROLES, ""),
        "loss": history.history.get("loss", []),
    }
    Path(sys.argv[1], f"{config.task_type}_{config.task_index}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
