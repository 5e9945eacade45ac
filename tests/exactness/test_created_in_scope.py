"""Variables that were not created in the strategy's scope are refused where a step changes them."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import DEVICES, arrays, batches, three_replicas

from keras_het import HeterogeneousStrategy

MESSAGE = (
    r"(?s)created in strategy\.scope\(\).*3 replicas.*Received: .*{}.*Create or load the model"
)


def model_around(layer, strategy=None):
    with (strategy or three_replicas()).scope():
        model = keras.Sequential([keras.Input((5,)), layer, keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def built_outside(layer):
    layer.build((None, 5))
    return layer


def statistics():
    return keras.layers.BatchNormalization(center=False, scale=False, name="statistics")


OUTSIDE = {
    "base/kernel, base/bias": lambda: keras.layers.Dense(5, name="base"),
    "statistics/moving_mean": statistics,
}


@pytest.mark.parametrize("names", OUTSIDE)
def test_layers_built_outside_of_the_scope(names):
    model = model_around(built_outside(OUTSIDE[names]()))
    with pytest.raises(ValueError, match=MESSAGE.format(names)):
        model.fit(three_replicas().distribute(batches()), verbose=0)


def test_weights_added_outside_of_the_scope():
    layer = keras.layers.Dense(5)
    model = model_around(layer)
    layer.enable_lora(2)
    with three_replicas().scope():
        model.compile(keras.optimizers.SGD(0.1), "mse")
    with pytest.raises(ValueError, match=MESSAGE.format("lora_kernel_a")):
        model.fit(three_replicas().distribute(batches()), verbose=0)


def test_what_no_step_changes_may_come_from_outside():
    layer = built_outside(keras.layers.Dense(5))
    layer.trainable = False
    model = model_around(layer)
    model.fit(three_replicas().distribute(batches()), verbose=0)
    model.evaluate(three_replicas().distribute(batches()), verbose=0)


def test_one_replica_may_train_layers_built_outside():
    layer = built_outside(keras.layers.Dense(5))
    before = keras.ops.convert_to_numpy(layer.kernel)
    strategy = HeterogeneousStrategy(devices=DEVICES[:1])
    model = model_around(layer, strategy)
    model.fit(tf.data.Dataset.from_tensor_slices(arrays()).batch(8), verbose=0)
    assert abs(keras.ops.convert_to_numpy(layer.kernel) - before).max() > 1e-3


def compiled_again(strategy, metrics, first):
    """The model compiled again outside of the scope, after training or before; and its logs."""
    keras.utils.set_random_seed(3)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    x, y = arrays()
    if first == "fit":
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    elif first == "evaluate":
        model.evaluate(x, y, batch_size=8, verbose=0)
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(optimizer, "mse", metrics=[make() for make in metrics])
    history = model.fit(x, y, batch_size=8, shuffle=False, epochs=2, verbose=0).history
    logs = [model.train_on_batch(x[:7], y[:7]), model.evaluate(x, y, batch_size=8, verbose=0)]
    assert model.optimizer is optimizer
    return [*history.values(), *map(np.ravel, logs), *model.get_weights(), *optimizer.variables]


@pytest.mark.full
@pytest.mark.parametrize("metrics", [(), (keras.metrics.MeanAbsoluteError,)], ids=["none", "own"])
@pytest.mark.parametrize("first", ["nothing", "evaluate", "fit"])
def test_compiled_again_outside_of_the_scope(metrics, first):
    actual = compiled_again(
        HeterogeneousStrategy(devices=DEVICES, shares=[3, 1, 0]), metrics, first
    )
    expected = compiled_again(None, metrics, first)
    for ours, one_device in zip(actual, expected, strict=True):
        np.testing.assert_allclose(np.array(ours), np.array(one_device), rtol=1e-4, atol=2e-6)


def test_an_optimizer_of_mixed_precision_from_outside():
    inner = keras.optimizers.SGD(0.1)
    optimizer = keras.optimizers.LossScaleOptimizer(inner)
    with three_replicas().scope():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    x, y = arrays()
    model.fit(x, y, batch_size=8, verbose=0)
    assert int(np.array(inner.iterations)) == -(-len(x) // 8)
