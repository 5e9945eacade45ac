"""State and random numbers of layers, what lies on which device, how often layers are called."""

from __future__ import annotations

import contextlib
from typing import ClassVar

import keras
import numpy as np
import pytest
from pipeline_training import DEVICES, plan_of

import keras_het
from keras_het.planning.pipeline import Stage as PlannedStage
from keras_het.strategy.pipeline.model_units import ModelUnits
from keras_het.strategy.pipeline.stage import Stage

L, ops = keras.layers, keras.ops
ROWS = 8
pytestmark = pytest.mark.usefixtures("double_precision", "logical_devices")


def strategy_of(
    bounds,
    replicas,
    routes,
    recomputed=(),
):
    plan = plan_of(bounds, replicas, routes, recomputed=recomputed)
    return keras_het.PipelineStrategy(None, plan.num_micro_batches, DEVICES, plan=plan)


def normalizing():
    layers = [L.Dense(4), L.BatchNormalization(momentum=0.8), L.Dense(3), L.Dropout(0.4)]
    model = keras.Sequential([keras.Input([5]), *layers, L.GaussianNoise(0.1), L.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", jit_compile=False)
    return model


def values(rows=ROWS):
    random = np.random.default_rng(0)
    return random.normal(size=(rows, 5)), random.normal(size=(rows, 1))


def trained(strategy, steps=2):
    """Weights, state and random generators after some steps."""
    keras.utils.set_random_seed(3)
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        model = normalizing()
    x, y = values()
    model.fit(x, y, batch_size=ROWS, epochs=steps, verbose=0, shuffle=False)
    return [keras.ops.convert_to_numpy(v) for v in [*model.variables, *model.optimizer.variables]]


def assert_equal(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.full
def test_one_micro_batch_is_normalized_and_dropped_as_on_one_device():
    expected = trained(None)
    again = ([], [3, 4, 5])
    assert_equal(trained(strategy_of([0, 1, 6], [[2], [1]], [(0,), (0,)], again)), expected)


@pytest.mark.full
def test_layers_that_are_computed_again_see_the_same_random_numbers():
    bounds, replicas, routes = [0, 3, 6], [[2, 0], [1]], [(0, 1, 0), (0, 0, 0)]
    plain = trained(strategy_of(bounds, replicas, routes))
    again = trained(strategy_of(bounds, replicas, routes, ([0, 1, 2], [3, 4])))
    assert_equal(again, plain)
    # generators are where they are after as many steps of one device
    for one, other in zip(again, trained(None), strict=True):
        if one.dtype.kind in "iu":
            np.testing.assert_array_equal(one, other)


def test_moving_averages_take_the_mean_over_micro_batches():
    x, _ = values()
    kernel, bias, _, _, mean, variance, *_ = trained(
        strategy_of([0, 2, 6], [[2, 0], [1]], [(0, 1), (0, 0)]), 1
    )
    keras.utils.set_random_seed(3)
    kernel, bias, *_ = normalizing().get_weights()
    parts = np.split(x @ kernel + bias, 2)
    means, variances = (np.mean([f(p, axis=0) for p in parts], axis=0) for f in (np.mean, np.var))
    np.testing.assert_allclose(mean, 0.2 * means, rtol=1e-9)
    np.testing.assert_allclose(variance, 0.8 + 0.2 * variances, rtol=1e-9)


def test_micro_batches_have_random_numbers_of_their_own():
    """The metric has one bit for each element that is kept."""
    strategy = strategy_of([0, 1, 2], [[1], [2, 0]], [(0, 0), (1, 0)])
    codes = 2.0 ** np.arange(ROWS * 5).reshape(ROWS, 5)
    masks = []
    with strategy.scope():
        layer = L.Dense(5, use_bias=False, kernel_initializer="identity")
        model = keras.Sequential([keras.Input([5]), layer, L.Dropout(0.5, seed=4)])

        def kept(codes, found):
            return keras.ops.mean(codes * found, axis=-1)

        model.compile(keras.optimizers.SGD(0.0), "mse", metrics=[kept], jit_compile=False)
    for _ in range(2):
        _, found = model.train_on_batch(np.ones([ROWS, 5]), codes)
        model.reset_metrics()
        bits = round(found * ROWS * 5 / 2)
        masks += [bits % 2**20, bits >> 20]
    assert len(set(masks)) == 4 and all(0 < mask < 2**20 - 1 for mask in masks)


def bytes_on_devices(variables):
    """How many bytes of variables each device holds, by its short name."""
    sizes = {}
    for variable in variables:
        name = variable.value.device.rpartition("/device:")[2]
        size = variable.value.dtype.size * variable.value.shape.num_elements()
        sizes[name] = sizes.get(name, 0) + size
    return sizes


def test_a_device_holds_what_its_stages_train():
    strategy = strategy_of([0, 2, 4], [[1], [3]], [(0, 0)] * 2)
    with strategy.scope():
        layers = [L.Dense(10), L.BatchNormalization(), L.Dense(20, "relu"), L.Dense(5)]
        model = keras.Sequential([keras.Input([5]), *layers])
        model.compile("adam", "mse", jit_compile=False)
    model.fit(np.ones([4, 5]), np.ones([4, 5]), verbose=0)
    found = bytes_on_devices([*model.variables, *model.optimizer.variables])
    # each weight with two slots; moving mean and variance without
    first, second = (5 * 10 + 10 + 2 * 10), (10 * 20 + 20 + 20 * 5 + 5)
    assert found[DEVICES[1]] == 8 * (3 * first + 2 * 10)
    assert found[DEVICES[3]] == 8 * 3 * second
    assert sum(found.values()) - found[DEVICES[1]] - found[DEVICES[3]] < 100


class Counts(L.Dense):
    """Counts how often Keras calls it while a step is traced."""

    calls = 0

    def call(self, inputs, *args, **options):
        Counts.calls += 1
        return super().call(inputs, *args, **options)


@pytest.mark.full
def test_layers_are_not_called_more_often_for_more_micro_batches():
    calls = {}
    for number in (4, 16):
        strategy = strategy_of([0, 1, 2], [[1], [2, 0]], [(0,) * number, (0, 1) * (number // 2)])
        with strategy.scope():
            model = keras.Sequential([keras.Input([5]), Counts(4), Counts(1)])
            model.compile("sgd", "mse", jit_compile=False)
        x, y = values(32)
        Counts.calls = 0
        model.fit(x, y, batch_size=32, verbose=0)
        calls[number] = Counts.calls
    assert calls[16] == calls[4] <= 12


class Own(L.Layer):
    """State of every kind: what it becomes after one call, by name."""

    updates: ClassVar = {
        "rows": ("int64", "none", lambda v, x: v + ops.cast(ops.shape(x)[0], "int64")),
        "float_rows": ("float64", "none", lambda v, x: v + ops.cast(ops.shape(x)[0], "float64")),
        "summed_rows": ("float64", "sum", lambda v, x: v + ops.cast(ops.shape(x)[0], "float64")),
        "summed_integers": ("int32", "sum", lambda v, x: v + ops.shape(x)[0]),
        "steps": ("int32", "none", lambda v, x: v + 1),
        "float_steps": ("float64", "none", lambda v, x: v + 1.0),
        "first_steps": ("float64", "only_first_replica", lambda v, x: v + 1.0),
        "moving": ("float64", "none", lambda v, x: 0.9 * v + 0.1 * ops.mean(x)),
        "mean": ("float64", "mean", lambda v, x: 0.9 * v + 0.1 * ops.mean(x)),
        "root": ("float64", "none", lambda v, x: ops.sqrt(ops.mean(ops.square(x)))),
        "total": ("float64", "none", lambda v, x: v + ops.sum(x)),
        "largest": ("float64", "none", lambda v, x: ops.maximum(v, ops.max(x))),
        "is_used": ("bool", "none", lambda v, x: True),
    }

    def __init__(self, names=tuple(updates), **options):
        super().__init__(**options)
        self.names = names

    def build(self, shape):
        for name in self.names:
            dtype, aggregation, _ = self.updates[name]
            kept = self.add_weight((), "zeros", dtype, trainable=False, aggregation=aggregation)
            setattr(self, name, kept)

    def call(self, inputs):
        for name in self.names:
            variable = getattr(self, name)
            variable.assign(self.updates[name][2](variable, inputs))
        return inputs


def own_state(strategy):
    keras.utils.set_random_seed(3)
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        layer = Own()
        layers = [L.Dense(4, "tanh", name="one"), layer, L.Dense(1)]
        model = keras.Sequential([keras.Input([5]), *layers])
        model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    x, y = values(11)  # the last batch has less rows than micro-batches
    model.fit(x, y, batch_size=8, epochs=2, verbose=0, shuffle=False)
    model.predict(x, batch_size=8, verbose=0)
    return {name: float(ops.convert_to_numpy(getattr(layer, name))) for name in Own.updates}


@pytest.mark.full
@pytest.mark.parametrize("recomputed", [([], []), ([0, 1], [2])], ids=["kept", "recomputed"])
def test_state_of_layers_is_that_of_one_device(recomputed, caplog):
    plan = strategy_of([0, 2, 3], [[2], [1]], [(0,) * 4] * 2, recomputed)
    found, expected = own_state(plan), own_state(None)
    assert found["rows"] == 33
    for name in Own.updates:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-9, err_msg=name)
    assert not [each for each in caplog.records if each.name.startswith("keras_het")]


class Spread(L.Layer):
    """The rows of a micro-batch depend on each other."""

    def build(self, shape):
        self.spread = self.add_weight((), "zeros", trainable=False, name="spread")

    def call(self, inputs):
        self.spread.assign(ops.sum(ops.square(inputs - ops.mean(inputs, axis=0))))
        return inputs


def test_state_about_which_nothing_is_known_is_named(caplog):
    with strategy_of([0, 1, 2], [[2], [1]], [(0,) * 4] * 2).scope():
        model = keras.Sequential([keras.Input([5]), Spread(name="own"), L.Dense(1)])
        model.compile("sgd", "mse", jit_compile=False)
    model.fit(*values(), batch_size=8, verbose=0)
    messages = [r.getMessage() for r in caplog.records if r.name.startswith("keras_het")]
    assert any("own/spread': the mean over samples" in message for message in messages)


def test_a_weight_that_a_layer_assigns_is_refused():
    with strategy_of([0, 1, 2], [[2], [1]], [(0,) * 4] * 2).scope():
        normalized = L.SpectralNormalization(L.Dense(3, name="inner"))
        model = keras.Sequential([keras.Input([5]), normalized, L.Dense(1)])
        model.compile("sgd", "mse", jit_compile=False)
    with pytest.raises(ValueError, match=r"Received: a layer that assigns to '.*kernel'"):
        model.fit(*values(), batch_size=8, verbose=0)


def traced_stage(layer):
    units = ModelUnits(keras.Sequential([keras.Input([3]), layer]))
    stage = Stage(units, PlannedStage(0, len(units.units), (0, 1), (0, 1)))
    state = [variable.value for variable in stage.state]
    weights = [variable.value for variable in stage.weights]
    stage.forward(weights, state, {units.inputs[0]: ops.ones([2, 3])}, {}, True)
    return stage


def test_a_maximum_is_refused_where_each_process_would_have_its_own():
    with pytest.raises(ValueError, match=r"Received: .*variable_?\d*\. Give split_after="):
        traced_stage(Own(["rows", "largest"])).check_may_be_shared(True)
    for layer in (L.BatchNormalization(), L.Dropout(0.5), Own(["rows", "total", "root", "steps"])):
        traced_stage(layer).check_may_be_shared(True)
