"""Trains one model on one device and in a pipeline, in float64, and compares everything."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import keras
import numpy as np
from devices import DEVICES

from keras_het.planning.pipeline import PipelinePlan, Stage

ROWS = 38  # the last batch of 12 has 2: fewer than micro-batches


@contextlib.contextmanager
def floatx(name):
    before = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx(name)
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_floatx(before[0])
        keras.config.set_dtype_policy(before[1])


def plan_of(
    bounds,
    replicas,
    routes,
    schedule="1f1b",
    recomputed=(),
):
    """A plan of stages between bounds."""
    again = [*map(tuple, recomputed), *[()] * len(replicas)]
    stages = tuple(
        Stage(first, end, tuple(devices), tuple(route), tuple(units))
        for first, end, devices, route, units in zip(
            bounds, bounds[1:], replicas, routes, again, strict=False
        )
    )
    return PipelinePlan(stages, len(routes[0]), schedule, 0.0, (0.0,) * len(DEVICES))


@dataclasses.dataclass
class Outcome:
    """All that a user can see of a training."""

    model: keras.Model
    history: dict[str, list[float]]
    evaluation: Any
    predictions: Any

    @property
    def weights(self):
        return [np.array(value) for value in self.model.get_weights()]

    @property
    def optimizer(self):
        return [np.array(value) for value in self.model.optimizer.variables]


def train(
    build,
    data,
    strategy=None,
    **options,
):
    """Build, fit, evaluate and predict."""
    x, y, weight = data
    with strategy.scope() if strategy is not None else contextlib.nullcontext():
        keras.utils.set_random_seed(3)
        model = build()
    options = {"sample_weight": weight, "epochs": 2, "shuffle": False, **options}
    history = model.fit(
        x, y, batch_size=12, verbose=0, validation_data=(x, y), validation_batch_size=20, **options
    ).history
    evaluation = model.evaluate(x, y, batch_size=20, verbose=0)
    # batches of another size would be traced again
    return Outcome(model, history, evaluation, model.predict(x, batch_size=ROWS // 2, verbose=0))


def assert_same(found, expected, tolerance=1e-9):
    """Weights, optimizer state, logs and predictions are those of one device."""
    from equivalence import compare_structures  # programs of tests do without

    for name in ("weights", "optimizer", "history", "evaluation", "predictions"):
        both = getattr(found, name), getattr(expected, name)
        compare_structures(*both, tolerance, tolerance, name)
