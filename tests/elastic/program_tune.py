"""Ray Tune tries two learning rates; each trial is a training of two workers.

Argument: a folder.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def train(config):
    import keras
    import numpy as np

    import keras_het
    import keras_het.ray

    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).normal(size=(48, 4)).astype(np.float32)
    with keras_het.HeterogeneousStrategy().scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(config["rate"]), "mse")
    model.fit(
        x,
        x.sum(axis=1, keepdims=True),
        batch_size=12,
        epochs=3,
        verbose=0,
        callbacks=[
            keras_het.callbacks.ElasticBackup(config["backup_dir"]),
            keras_het.ray.ReportCallback(),
        ],
    )


def trial(config):
    from ray.train import RunConfig
    from ray.tune.integration.ray_train import TuneReportCallback

    import keras_het.ray

    folder = Path(config["folder"]) / str(config["rate"])
    keras_het.ray.KerasTrainer(
        train,
        2,
        resources_per_worker={"CPU": 1},
        train_loop_config={"rate": config["rate"], "backup_dir": str(folder / "backup")},
        run_config=RunConfig(storage_path=str(folder), callbacks=[TuneReportCallback()]),
    ).fit()


def main(folder):
    import ray
    from ray import cloudpickle, tune

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    about = {"object_store_memory": 80 * 2**20, "include_dashboard": False}
    ray.init(num_cpus=4, logging_level="ERROR", **about)
    tuner = tune.Tuner(
        trial,
        param_space={"rate": tune.grid_search([0.01, 0.1]), "folder": str(folder)},
        run_config=tune.RunConfig(storage_path=str(folder / "tune")),
        tune_config=tune.TuneConfig(metric="loss", mode="min", max_concurrent_trials=1),
    )
    results = tuner.fit()
    told = {each.config["rate"]: [each.metrics["epoch"], each.metrics["loss"]] for each in results}
    (folder / "told").write_text(
        json.dumps({"best": results.get_best_result().config["rate"], "told": told})
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
