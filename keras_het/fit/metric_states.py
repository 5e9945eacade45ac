"""Metrics of an interrupted epoch, as a row of numbers for each replica."""

from __future__ import annotations

from typing import TYPE_CHECKING

import keras
import numpy as np
import tensorflow as tf

if TYPE_CHECKING:
    from keras_het.strategy.heterogeneous_strategy import HeterogeneousStrategy


def metric_values(model: keras.Model) -> np.ndarray:
    """Values of all metrics' variables: float64 of shape (local replicas, numbers)."""
    columns = [
        np.stack([np.ravel(part.numpy()).astype(np.float64) for part in _parts(variable)])
        for variable in model.metrics_variables
    ]
    rows = max((len(column) for column in columns), default=1)
    columns = [np.repeat(each, rows, axis=0) if len(each) == 1 else each for each in columns]
    return np.concatenate(columns, axis=1) if columns else np.zeros((rows, 0))


def add_metrics(model: keras.Model, strategy: HeterogeneousStrategy, values: np.ndarray) -> None:
    """Continue from the metrics of all replicas, however many there are now."""
    variables = model.metrics_variables
    sizes = [int(np.prod(variable.shape, dtype=int)) for variable in variables]
    if sum(sizes) != values.shape[1]:
        return  # other metrics than before
    replicas = list(strategy.layout.local_replicas)
    is_same = len(values) == strategy.num_replicas_in_sync
    for variable, columns in zip(
        variables, np.split(values, np.cumsum(sizes)[:-1], axis=1), strict=True
    ):
        for replica, part in zip(replicas, _parts(variable), strict=False):
            if is_same:
                row = columns[replica]
            elif variable.aggregation != "sum":
                row = columns[0]
            elif replica == 0:
                row = columns.sum(axis=0)
            else:
                continue
            part.assign(tf.cast(row.reshape(variable.shape), part.dtype))


def _parts(variable: keras.Variable) -> tuple[tf.Variable, ...]:
    """The variables of this process's replicas."""
    return tuple(getattr(variable.value, "values", (variable.value,)))
