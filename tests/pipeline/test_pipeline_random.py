"""Random models under random plans train as on one device."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from pipeline_training import DEVICES, floatx
from random_models import random_data, random_model, random_plan

import keras_het

EXAMPLES, QUICK = 40, (3,)


def train(seed: int) -> list[Any]:
    """All that a fit, an evaluation and a prediction leave."""
    keras.utils.set_random_seed(seed)
    model = random_model(seed)
    x, y = random_data(model, seed)
    history = model.fit(x, y, batch_size=5, epochs=1, shuffle=False, verbose=0).history
    found = [*history.values(), model.evaluate(x, y, batch_size=99, verbose=0)]
    found += keras.tree.flatten(model.predict(x, batch_size=99, verbose=0))
    variables = [*model.variables, *model.optimizer.variables]
    return [*found, *map(keras.ops.convert_to_numpy, variables)]


@pytest.mark.quick(*map(str, QUICK))
@pytest.mark.parametrize("seed", range(EXAMPLES))
def test_a_random_model_trains_as_on_one_device(logical_devices: Any, seed: int) -> None:
    with floatx("float64"):
        expected = train(seed)
        plan = random_plan(random_model(seed), seed)
        strategy = keras_het.PipelineStrategy(plan, plan.micro_batches, DEVICES)
        with strategy.scope():
            found = train(seed)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9, err_msg=str(plan))
