"""The replicas of this process, and their devices."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_het.fit.model_strategy import distribute_strategy


def local_replicas(model: Any) -> dict[int, str]:
    """Devices of the replicas of this process, by their numbers.

    Args:
        model: a `keras.Model`.

    Returns:
        Under a `HeterogeneousStrategy` numbers that count over all workers; under another strategy,
        or none, numbers within this process.
    """
    strategy = distribute_strategy(model)
    layout = getattr(strategy, "layout", None)
    try:
        devices = strategy.extended.worker_devices
    except RuntimeError:  # there is no strategy
        found = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
        devices = [found[0].name]
    numbers = range(len(devices)) if layout is None else layout.local_replicas
    return dict(zip(numbers, devices, strict=True))
