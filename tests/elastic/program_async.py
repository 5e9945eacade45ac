"""Two nodes of Ray that train together and a slow one that trains asynchronously.

Argument: a folder. An async worker is killed once; each epoch is reported.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

EPOCHS, NUM_SAMPLES, BATCH = 8, 480, 12


def train(config):
    import keras
    import numpy as np

    import keras_het
    import keras_het.ray
    from keras_het.launch.local.worker_environment import Emulation

    folder = Path(config["folder"])
    os.environ.update(Emulation((1.0,), 0.0, fixed_seconds=0.02).environment_of(0))
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).normal(size=(NUM_SAMPLES, 4)).astype(np.float32)
    strategy = keras_het.HeterogeneousStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05), "mse")

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if not strategy.is_async_worker:
                return
            with (folder / "async-steps").open("a") as file:
                print(os.getpid(), file=file)
            if batch >= 2 and not (once := folder / "died").exists():
                once.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    callbacks = [
        keras_het.callbacks.AsyncWorkers(),
        keras_het.callbacks.ElasticBackup(str(folder / "backup"), save_freq=5),
        Watch(),
        keras_het.ray.ReportCallback(),
    ]
    targets = x.sum(axis=1, keepdims=True)
    model.fit(x, targets, batch_size=BATCH, epochs=EPOCHS, verbose=0, callbacks=callbacks)
    if strategy.is_chief:
        np.savez(folder / "weights.npz", *model.get_weights())


def main(folder):
    import ray
    from ray import cloudpickle
    from ray.cluster_utils import Cluster
    from ray.train import RunConfig

    import keras_het.ray
    from keras_het.ray.cluster import ASYNC, ROLE_LABEL

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    about = {"num_cpus": 4, "object_store_memory": 80 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={**about, "include_dashboard": False})
    try:
        for labels in ({}, {}, {ROLE_LABEL: ASYNC}):
            cluster.add_node(**about, resources={"het": 1}, labels=labels)
        ray.init(address=cluster.address, logging_level="ERROR")
        trainer = keras_het.ray.KerasTrainer(
            train,
            3,
            resources_per_worker={"het": 1},
            train_loop_config={"folder": str(folder)},
            run_config=RunConfig(storage_path=str(folder / "results")),
        )
        (folder / "reported").write_text(json.dumps(trainer.fit().metrics))
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
