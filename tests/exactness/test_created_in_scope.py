"""Variables that were not created in the strategy's scope are refused where a step changes them."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import DEVICES, arrays, assert_all_close, batches, three_replicas

from keras_het import HeterogeneousStrategy

MESSAGE = (
    r"(?s)created in strategy\.scope\(\).*3 replicas.*Received: .*{}.*Create or load the model"
)


def model_around(layer, strategy=None):
    with (strategy or three_replicas()).scope():
        model = keras.Sequential([keras.Input((5,)), layer, keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def linear(scope, *compiled):
    with scope:
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
        if compiled:
            model.compile(*compiled)
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


def added_after(strategy, x):
    with strategy.scope():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)])
    model.add(keras.layers.Dense(1, name="added"))
    return model


def called_first_outside(strategy, x):
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1, name="late")])
    model(x)
    return model


def weight_added_outside(strategy, x):
    model = linear(strategy.scope())
    model.extra = model.add_weight(shape=(), name="extra")
    return model


def lora_outside(strategy, x):
    model = linear(strategy.scope())
    model.layers[0].enable_lora(2)
    return model


LATE = {
    "added": added_after,
    "late": called_first_outside,
    "extra": weight_added_outside,
    "lora_kernel_a": lora_outside,
}


@pytest.mark.quick("lora_kernel_a")
@pytest.mark.parametrize("name", LATE)
def test_an_optimizer_with_slots_names_what_was_created_outside(name):
    x, y = arrays()
    model = LATE[name](three_replicas(), x)
    model.compile("adam", "mse")
    with pytest.raises(ValueError, match=MESSAGE.format(name)):
        model.fit(x, y, verbose=0)


def test_one_replica_gives_slots_to_what_was_created_outside():
    x, y = arrays()
    weights = []
    for strategy in (HeterogeneousStrategy(devices=DEVICES[:1]), None):
        keras.utils.set_random_seed(3)
        model = lora_outside(strategy or tf.distribute.get_strategy(), x)
        model.compile(keras.optimizers.Adam(0.1), "mse")
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        weights.append(model.get_weights())
    assert_all_close(*weights)


def loop(model, optimizer, x, y):
    for _ in range(3):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y[:, None]) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)


def test_an_eager_loop_in_the_scope_is_pointed_to_run():
    model = model_around(keras.layers.Dense(3))
    received = r"Received: a gradient or update of .*kernel.* call strategy\.run\(step, args"
    with three_replicas().scope(), pytest.raises(ValueError, match=received):
        loop(model, model.optimizer, *arrays())


@pytest.mark.full
def test_an_eager_loop_outside_of_the_scope_is_that_of_one_device():
    weights = []
    for scope in (three_replicas().scope(), contextlib.nullcontext()):
        keras.utils.set_random_seed(3)
        model = linear(scope, "adam", "mse")
        loop(model, model.optimizer, *arrays())
        model.fit(*arrays(), batch_size=8, shuffle=False, verbose=0)
        weights.append(model.get_weights())
    assert_all_close(*weights)


def compiled_in(scope):
    model = linear(three_replicas().scope())
    with scope:
        model.compile("adam", "mse")
    model.fit(*arrays(), verbose=0)


def optimizer_of_no_strategy(scope):
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.Adam()
    with scope:
        loop(model, optimizer, *arrays())


@pytest.mark.parametrize("mix", [compiled_in, optimizer_of_no_strategy])
def test_parts_of_different_strategies_are_refused(mix):
    scope = (
        HeterogeneousStrategy(devices=DEVICES).scope()
        if mix is optimizer_of_no_strategy
        else tf.distribute.MirroredStrategy(DEVICES[:2]).scope()
    )
    with pytest.raises(RuntimeError, match=r"belong to one strategy.* Received: one of .*Hete"):
        mix(scope)


def test_other_strategies_keep_the_words_of_tensorflow():
    three_replicas()
    mirrored = tf.distribute.MirroredStrategy(DEVICES[:2])
    with mirrored.scope():
        variable = tf.Variable(1.0)
        with pytest.raises(ValueError, match="not available outside the replica context"):
            variable.handle  # noqa: B018
    with pytest.raises(RuntimeError, match='Need to be inside "with strategy'):
        mirrored.extended.colocate_vars_with(variable)


@pytest.mark.full
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
    scope = strategy.scope() if strategy else contextlib.nullcontext()
    model = linear(scope, "adam", "mse")
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
        HeterogeneousStrategy(devices=DEVICES, share_weights=[3, 1, 0]), metrics, first
    )
    expected = compiled_again(None, metrics, first)
    assert_all_close(actual, expected)


def test_an_optimizer_of_mixed_precision_from_outside():
    inner = keras.optimizers.SGD(0.1)
    optimizer = keras.optimizers.LossScaleOptimizer(inner)
    model = linear(three_replicas().scope())
    model.compile(optimizer, "mse")
    x, y = arrays()
    model.fit(x, y, batch_size=8, verbose=0)
    assert int(np.array(inner.iterations)) == -(-len(x) // 8)
