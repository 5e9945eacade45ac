"""Program: all-reduces tensors with one of two strategies. Arguments: which, folder of results."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import keras_het


def main() -> None:
    which, folder = sys.argv[1:]
    strategy = (
        keras_het.HeterogeneousStrategy()
        if which == "ours"
        else tf.distribute.MultiWorkerMirroredStrategy()
    )
    index = strategy.cluster_resolver.task_id
    random = np.random.default_rng(index)
    arrays = {
        "matrix": random.normal(size=(7, 3)).astype("float32"),
        "scalar": np.float32(random.normal()),
        "large": random.normal(size=(70_000,)).astype("float32"),
        "double": random.normal(size=(5,)),
        "half": random.normal(size=(9,)).astype("float16"),
        "whole": random.integers(-9, 9, size=(4,)),
    }

    @tf.function
    def step() -> Any:
        def replica_function() -> Any:
            context = tf.distribute.get_replica_context()
            values = {name: tf.constant(value) for name, value in arrays.items()}
            # Values of different types one by one: TensorFlow's cannot pack them together.
            sums = {name: context.all_reduce("SUM", value) for name, value in values.items()}
            means = [context.all_reduce("MEAN", values[name]) for name in ("matrix", "double")]
            packed = context.all_reduce("SUM", [values["matrix"], values["large"]])
            return sums, means, packed

        return strategy.run(replica_function)

    leaves = tf.nest.flatten(step())
    results = {
        f"result_{position}": strategy.experimental_local_results(leaf)[0].numpy()
        for position, leaf in enumerate(leaves)
    }
    np.savez(Path(folder) / f"{which}-{index}.npz", **results)


main()
