"""Custom loops keep the meaning of tf.distribute: nothing is weighted for them."""

import functools
import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import DEVICES, arrays, batches, three_replicas

from keras_het import HeterogeneousStrategy


@functools.cache
def stock_strategy():
    return tf.distribute.MirroredStrategy(
        DEVICES, cross_device_ops=tf.distribute.ReductionToOneDevice()
    )


def values(strategy, function):
    return strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(function(context.replica_id_in_sync_group))
    )


@pytest.mark.parametrize("operation", ["SUM", "MEAN"])
@pytest.mark.parametrize("axis", [None, 0])
def test_reduce_is_that_of_mirrored_strategy(logical_devices, operation, axis):
    three_replicas().set_shares((4, 2, 1))
    results = []
    for strategy in (three_replicas(), stock_strategy()):
        value = values(strategy, lambda replica: [[1.0 + replica, 2.0], [5.0, replica * 3.0]])
        results.append(strategy.reduce(operation, value, axis=axis).numpy())
    np.testing.assert_allclose(*results)
    assert np.abs(results[0]).max() > 1


@pytest.mark.parametrize("axis", [0, 1])
def test_gather_is_that_of_mirrored_strategy(logical_devices, axis):
    results = []
    for strategy in (three_replicas(), stock_strategy()):
        value = values(strategy, lambda replica: [[1.0 + replica, 2.0], [5.0, replica * 3.0]])
        results.append(strategy.gather(value, axis=axis).numpy())
    np.testing.assert_array_equal(*results)


def test_gather_of_unequal_numbers_of_rows():
    value = values(three_replicas(), lambda replica: [[float(replica)]] * (replica + 1))
    gathered = three_replicas().gather(value, axis=0)
    np.testing.assert_array_equal(gathered[:, 0], [0, 1, 1, 2, 2, 2])


@pytest.mark.parametrize("weights", [(4, 2, 1), (1, 0, 0)])
def test_all_reduce_in_run_is_not_weighted(weights):
    strategy = three_replicas()
    strategy.set_shares(weights)
    value = values(strategy, lambda replica: 10.0**replica)

    @tf.function
    def run():
        def step(x):
            context = tf.distribute.get_replica_context()
            total, mean = (context.all_reduce(op, x) for op in ("SUM", "MEAN"))
            return total, mean, context.all_gather(tf.reshape(x, (1,)), axis=0)

        return strategy.run(step, args=(value,))

    total, mean, gathered = run()
    for replica in range(3):
        assert float(strategy.experimental_local_results(total)[replica]) == 111.0
        assert float(strategy.experimental_local_results(mean)[replica]) == 37.0
        np.testing.assert_array_equal(
            strategy.experimental_local_results(gathered)[replica], [1, 10, 100]
        )


def test_keras_outside_of_its_own_step_is_untouched():
    # a custom loop that calls a Loss object gets Keras's own division by the number of replicas
    strategy = three_replicas()
    strategy.set_shares((4, 2, 1))
    loss = keras.losses.MeanSquaredError()
    x, y = arrays(4)

    @tf.function
    def run():
        return strategy.run(lambda: loss(y, x[:, :1]))

    inside = strategy.experimental_local_results(run())[0]
    np.testing.assert_allclose(inside * 3, loss(y, x[:, :1]), rtol=1e-6)


def test_a_loop_on_emulated_devices_says_once_that_nothing_waits(monkeypatch, caplog):
    device = {"speed": 1, "fixed_seconds": 0.0, "seconds_per_sample": 1e-6}
    monkeypatch.setenv("KERAS_HET_EMULATED_DEVICES", json.dumps([device]))
    strategy = HeterogeneousStrategy(devices=DEVICES[:1])
    with strategy.scope():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(batches(8), verbose=0)
    model.evaluate(batches(8), verbose=0)
    model.predict(np.zeros((8, 5), np.float32), verbose=0)
    assert "strategy.run" not in caplog.text
    for _ in range(2):
        strategy.run(lambda: tf.constant(1.0))
    assert caplog.text.count("strategy.run does not wait for emulated devices") == 1
