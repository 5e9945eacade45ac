"""Random models under random plans train as on one device."""

import itertools
from typing import Any

import keras
import numpy as np
import pytest
from pipeline_training import DEVICES, floatx, plan_of

import keras_het
from keras_het.strategy.pipeline.model_units import ModelUnits

L = keras.layers
EXAMPLES = 40


def random_model(seed):
    """Skips, shared layers, operations, nested models; one or two inputs and outputs."""
    random = np.random.default_rng(seed)
    inputs = [keras.Input([int(random.integers(3, 5))]) for _ in range(random.integers(1, 3))]
    made, shared = list(inputs), dict[int, Any]()
    for _ in range(random.integers(4, 9)):
        x = made[random.integers(max(0, len(made) - 4), len(made))]
        width = x.shape[-1]
        others = [each for each in made if each.shape[-1] == width]
        y = others[random.integers(len(others))]
        kind = random.choice(["dense", "shared", "add", "multiply", "join", "operation", "nested"])
        if kind == "shared":
            layer = shared.setdefault(width, L.Dense(4, "tanh", kernel_regularizer="l2"))
            made.append(layer(x))
        elif kind == "nested":
            layers = [L.Dense(4, "tanh"), L.LayerNormalization()]
            made.append(keras.Sequential([keras.Input([width]), *layers])(x))
        elif kind == "add":
            made.append(L.add([x, L.Dense(width)(y)]))
        elif kind == "multiply":
            made.append(L.multiply([L.Dense(width, "sigmoid")(x), y]))
        elif kind == "join":
            made.append(L.concatenate([x, made[-1]]))
        elif kind == "operation":
            made.append(keras.ops.tanh(x) * 0.5 + y)
        else:
            made.append(L.Dense(4, "tanh", activity_regularizer="l2")(x))
    outputs = [L.Dense(1)(L.concatenate([made[-1], *inputs]))]
    if random.integers(2):
        outputs.append(L.Dense(2)(made[len(made) // 2]))
    model = keras.Model(inputs, outputs)
    clip = [{}, {"global_clipnorm": 0.1}, {"clipnorm": 0.1}][random.integers(3)]
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9, **clip)
    model.compile(optimizer, ["mse"] * len(outputs), jit_compile=False)
    return model


def random_plan(model, seed):
    """Up to four stages on up to four devices, any routes, any layers computed again."""
    random = np.random.default_rng([seed, 1])
    units = ModelUnits(model)
    end = len(units.units)
    cuts = [c for c in range(1, end) if not any(a < c <= b for a, b in units.together)]
    number = int(random.integers(1, min(4, len(cuts) + 1) + 1))
    chosen = sorted(int(c) for c in random.choice(cuts, number - 1, replace=False))
    bounds = [0, *chosen, end]
    micro_batches = int(random.integers(1, 5))
    devices = random.permutation(4).tolist()
    replicas = []
    for stage in range(number):
        most = min(len(devices) - (number - stage - 1), micro_batches)
        replicas.append([devices.pop() for _ in range(random.integers(1, most + 1))])
    routes = [
        tuple(random.permutation([m % len(own) for m in range(micro_batches)]).tolist())
        for own in replicas
    ]
    recomputed = [
        [unit for unit in range(a, b) if random.integers(2)] for a, b in itertools.pairwise(bounds)
    ]
    schedule = str(random.choice(["1f1b", "gpipe"]))
    return plan_of(bounds, replicas, routes, schedule, recomputed)


def random_data(model, seed):
    """A few rows for a model's inputs and outputs."""
    random = np.random.default_rng([seed, 2])
    rows = int(random.integers(6, 16))
    x, y = (
        [random.normal(size=(rows, *tensor.shape[1:])) for tensor in tensors]
        for tensors in (model.inputs, model.outputs)
    )
    return x, y


def train(seed):
    """All that a fit, an evaluation and a prediction leave."""
    keras.utils.set_random_seed(seed)
    model = random_model(seed)
    x, y = random_data(model, seed)
    history = model.fit(x, y, batch_size=5, epochs=1, shuffle=False, verbose=0).history
    found = [*history.values(), model.evaluate(x, y, batch_size=99, verbose=0)]
    found += keras.tree.flatten(model.predict(x, batch_size=99, verbose=0))
    variables = [*model.variables, *model.optimizer.variables]
    return [*found, *map(keras.ops.convert_to_numpy, variables)]


@pytest.mark.full
@pytest.mark.parametrize("seed", range(EXAMPLES))
def test_a_random_model_trains_as_on_one_device(logical_devices, seed):
    with floatx("float64"):
        expected = train(seed)
        plan = random_plan(random_model(seed), seed)
        strategy = keras_het.PipelineStrategy(None, plan.num_micro_batches, DEVICES, plan=plan)
        with strategy.scope():
            found = train(seed)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9, err_msg=str(plan))
