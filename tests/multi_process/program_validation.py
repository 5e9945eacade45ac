"""Program: two workers of which one has wrong data, then two whose data is not alike.

Argument: folder for the results.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import keras_het
from keras_het.callbacks import DataValidation
from keras_het.loader import validation

BATCH = 8


def main() -> None:
    folder = Path(sys.argv[1])
    strategy = keras_het.HeterogeneousStrategy(share_weights=[3, 1])
    keras.utils.set_random_seed(7)
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(4)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss)
    random = np.random.default_rng(0)
    x = random.random((80, 2), np.float32)
    y = np.tile([0, 0, 0, 1, 1, 2, 2, 3], 10)
    statistics = validation.statistics_of_dataset([(x, y)], categorical=["label"])
    schema = validation.set_comparison_thresholds(validation.infer_schema(statistics))
    result: dict[str, Any] = {"before": weights(model)}

    wrong = x.copy()
    wrong[BATCH - 1] = np.nan  # the last row of the first batch: worker 1's
    try:
        model.fit(batches(wrong, y), verbose=0, callbacks=[DataValidation(schema)])
    except validation.DataAnomalyError as error:
        result["error"] = str(error)
        result["anomalies"] = [anomaly.feature for anomaly in error.anomalies]
    result["after"] = weights(model)

    watch = DataValidation(
        schema, compare_shards=True, directory=folder / f"written_by_{strategy.worker_index}"
    )
    model.fit(batches(x, y), verbose=0, epochs=2, callbacks=[watch])
    result["trained"] = weights(model)
    result["distances"] = [
        [[each.shard, each.reference, each.feature, each.value] for each in epoch]
        for epoch in watch.distances
    ]
    (folder / f"worker_{strategy.worker_index}.json").write_text(json.dumps(result))


def batches(x: np.ndarray, y: np.ndarray) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)


def weights(model: keras.Model) -> list[Any]:
    return [weight.tolist() for weight in model.get_weights()]


main()
