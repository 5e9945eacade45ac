"""Fit, evaluate and predict in a pipeline have the numbers of one device."""

import functools

import keras
import numpy as np
import pytest
from pipeline_models import MODELS, compiled
from pipeline_training import DEVICES, assert_same, plan_of, train

import keras_het
from keras_het.strategy.pipeline.micro_batches import is_mean_over_samples
from keras_het.strategy.pipeline.model_units import ModelUnits

pytestmark = pytest.mark.usefixtures("double_precision", "logical_devices")


@functools.cache
def on_one_device(name):
    build, data = MODELS[name]
    return train(build, data())


def plans(name):
    """Three stages; two stages of two unequal replicas; one stage on three devices."""
    units = ModelUnits(on_one_device(name).model)
    end, shared = len(units.units), units.together
    cuts = [c for c in range(1, end) if not any(a < c <= b for a, b in shared)]
    first, second = cuts[len(cuts) // 3], cuts[-1]
    one = (0,) * 4
    return {
        "three stages": plan_of([0, first, second, end], [[0], [1], [2]], [one] * 3),
        "replicas": plan_of([0, first, end], [[3, 1], [0, 2]], [(0, 1, 1, 0), (0, 0, 0, 1)]),
        "one stage": plan_of([0, end], [[0, 2, 3]], [(0, 1, 2, 0)]),
        "recomputed": plan_of(
            [0, first, end],
            [[0], [1, 2]],
            [one, (0, 1, 0, 1)],
            recomputed=[range(first), [end - 1]],
        ),
        "gpipe": plan_of([0, second, end], [[0], [1]], [one] * 2, "gpipe"),
        "whole batches": plan_of([0, first, end], [[0], [1]], [(0,)] * 2),
    }


@pytest.mark.quick("own_loss-three stages")
@pytest.mark.parametrize("layout", ["three stages", "replicas"])
@pytest.mark.parametrize("name", MODELS)
def test_a_pipeline_trains_as_one_device(name, layout):
    check(name, layout)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["one stage", "recomputed", "gpipe", "whole batches"])
@pytest.mark.parametrize("name", MODELS)
def test_other_plans_train_as_one_device(name, layout):
    check(name, layout)


def check(name, layout):
    expected = on_one_device(name)
    plan = plans(name)[layout]
    strategy = keras_het.PipelineStrategy(None, plan.num_micro_batches, DEVICES, plan=plan)
    build, data = MODELS[name]
    assert_same(train(build, data(), strategy), expected)
    assert strategy.plan is plan


@pytest.mark.full
def test_a_measured_plan_trains_as_one_device():
    strategy = keras_het.PipelineStrategy(num_micro_batches=3, devices=DEVICES)
    build, data = MODELS["convnet"]
    assert_same(train(build, data(), strategy), on_one_device("convnet"))
    text = str(strategy.plan)
    assert "predicted step" in text and "data parallelism on all devices" in text


@pytest.mark.full
def test_inputs_are_converted_as_on_one_device():
    build, data = MODELS["own_loss"]
    x, y, _ = data()
    columns = x.astype("int32")[..., None], y, None
    expected = train(build, columns, epochs=1)
    strategy = keras_het.PipelineStrategy(num_micro_batches=2, devices=DEVICES[:2])
    assert_same(train(build, columns, strategy, epochs=1), expected)


@pytest.mark.full
def test_the_user_names_the_layers_to_cut_behind():
    strategy = keras_het.PipelineStrategy(["dense", "dense_1"], 4, DEVICES)
    build, data = MODELS["own_loss"]
    keras.backend.clear_session()
    assert_same(train(build, data(), strategy), on_one_device("own_loss"))
    assert strategy.plan is not None and len(strategy.plan.stages) == 3


def distance(y, prediction):
    return keras.ops.mean(keras.ops.square(y - prediction))


@pytest.mark.full
@pytest.mark.parametrize("loss", ["mse", distance])
def test_a_tensor_that_a_model_returns_twice(loss):
    def build():
        inputs = keras.Input([4])
        x = keras.layers.Dense(2, name="both")(keras.layers.Dense(3, "tanh")(inputs))
        options = {"loss": [loss, "mae"], "metrics": None, "weighted_metrics": None}
        return compiled(keras.Model(inputs, [x, x]), **options)

    x = np.random.default_rng(0).normal(size=(38, 4))
    data = x, [x[:, :2], x[:, 2:]], None
    strategy = keras_het.PipelineStrategy(
        None, 4, DEVICES, plan=plan_of([0, 1, 2], [[0], [1]], [(0,) * 4] * 2)
    )
    assert_same(train(build, data, strategy), train(build, data))


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ("mse", True),
        (keras.losses.MeanAbsoluteError(), True),
        (keras.losses.MeanSquaredError(reduction="sum"), False),
        (keras.losses.Dice(), False),
        (distance, False),
        (["mse", "mae"], True),
        (["mse", distance], False),
    ],
)
def test_a_mean_over_samples_is_known(loss, expected):
    losses = loss if isinstance(loss, list) else [loss]
    x = keras.Input((3,))
    model = keras.Model(x, [keras.layers.Dense(2)(x) for _ in losses])
    model.compile("sgd", losses)
    model.train_on_batch(np.ones((4, 3)), [np.ones((4, 2))] * len(losses))
    assert is_mean_over_samples(model) == expected
