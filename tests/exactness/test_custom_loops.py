"""Custom loops: every way of `tf.distribute` to iterate a dataset, and to reduce, as there.

Nothing is weighted for them. Each way to iterate walks over the same seven samples in global
batches of three and sums what the replicas get, so that a sample that is lost, repeated or out of
order shows.
"""

import functools
import gc
import json
import threading
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import DEVICES, arrays, batches, three_replicas
from iteration_ways import WAYS, summed

from keras_het import HeterogeneousStrategy
from keras_het.loader.input import step_iterator

SAMPLES = np.arange(7, dtype=np.int64)
BATCH = 3
SUMS = [0 + 1 + 2, 3 + 4 + 5, 6]
IMPORTED_BY_NAME = tf.nn.compute_average_loss


@functools.cache
def stock_strategy():
    return tf.distribute.MirroredStrategy(
        DEVICES, cross_device_ops=tf.distribute.ReductionToOneDevice()
    )


@pytest.fixture
def strategy(logical_devices):
    strategy = three_replicas()
    strategy.set_share_weights((3, 0, 1))
    return strategy


def distribute(strategy, samples=SAMPLES, batch=BATCH):
    return strategy.experimental_distribute_dataset(
        tf.data.Dataset.from_tensor_slices(samples).batch(batch)
    )


@pytest.mark.quick("next_in_function", "for_over_an_iterator")
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_every_sample_once_in_order(strategy, way):
    dataset = distribute(strategy)
    assert way(strategy, dataset) == SUMS
    assert way(strategy, dataset) == SUMS  # the next pass


def test_each_part_lies_on_its_replicas_device(strategy):
    for batch in distribute(strategy):
        places = [part.backing_device for part in strategy.experimental_local_results(batch)]
        assert places == list(strategy.extended.worker_devices)

    @tf.function
    def of_a_captured_batch():
        return summed(strategy, batch), summed(strategy, batch)

    assert [int(total) for total in of_a_captured_batch()] == [6, 6]


def test_the_end_inside_a_function_is_an_error_or_an_empty_optional(strategy):
    @tf.function
    def step(iterator):
        return summed(strategy, next(iterator))

    iterator = iter(distribute(strategy))
    with pytest.raises(tf.errors.OutOfRangeError):
        for _ in range(4):
            step(iterator)
    assert not iterator.get_next_as_optional().has_value()
    with pytest.raises(tf.errors.OutOfRangeError):
        step(iterator)


@pytest.mark.full
def test_two_loops_with_state_over_one_dataset(strategy):
    """A loop that changes values, means over rows, and one that changes a variable only."""
    with strategy.scope():
        counted = tf.Variable(0, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)

    @tf.function
    def loops(dataset):
        product = tf.constant(1.0, tf.float64)
        for batch in dataset:
            product *= tf.cast(strategy.reduce("MEAN", batch, axis=0), tf.float64)
        for batch in dataset:
            strategy.run(lambda part: counted.assign_add(1 + 0 * tf.size(part)), args=(batch,))
        return product

    assert float(loops(distribute(strategy))) == 1.0 * 4.0 * 6.0
    assert int(counted.numpy()) == 3


def test_a_loop_fetches_nothing_before_the_loop_above_it_has_ended(strategy, monkeypatch):
    fetched, find = [], step_iterator._find
    first, second = iter(distribute(strategy)), iter(distribute(strategy))
    numbers = [step_iterator.number_of(first), step_iterator.number_of(second)]
    is_early = threading.Event()
    started = tf.Variable(0)

    def noted(number):
        fetched.append(int(number))
        if int(number) == numbers[1]:
            is_early.set()
        return find(number)

    monkeypatch.setattr(step_iterator, "_find", noted)

    def slow(total):
        is_early.wait(0.02)  # for what must not happen yet
        return total

    @tf.function
    def loops(first, second):
        total = tf.constant(0, tf.int64)
        for batch in first:
            found = tf.numpy_function(slow, [summed(strategy, batch)], tf.int64)
            total += tf.ensure_shape(found, [])
        for _ in second:
            started.assign_add(1)
        return total

    assert int(loops(first, second)) == sum(SUMS)
    assert int(started) == len(SUMS)
    assert fetched == [number for number in numbers for _ in range(len(SUMS) + 1)]


@pytest.mark.full
def test_an_iterator_continues_within_a_loop_over_another_dataset(strategy):
    @tf.function
    def loop(iterator):
        total = summed(strategy, next(iterator))
        for factor in tf.data.Dataset.range(10, 12):
            total += factor * summed(strategy, next(iterator))
        return total

    assert int(loop(iter(distribute(strategy)))) == SUMS[0] + 10 * SUMS[1] + 11 * SUMS[2]


@pytest.mark.full
def test_functions_are_traced_once_whatever_is_iterated(strategy):
    traces = []

    @tf.function
    def epoch(dataset):
        traces.append("epoch")
        total = tf.constant(0, tf.int64)
        for batch in dataset:
            total += summed(strategy, batch)
        return total

    @tf.function
    def step(iterator):
        traces.append("step")
        return summed(strategy, next(iterator))

    for shares in ((3, 0, 1), (1, 1, 1), (0, 1, 0)):
        strategy.set_share_weights(shares)
        for size in (7, 5):
            dataset = distribute(strategy, SAMPLES[:size])
            assert int(epoch(dataset)) == SAMPLES[:size].sum()
            assert int(step(iter(dataset))) == SAMPLES[:3].sum()
    assert traces == ["epoch", "step"]


def structured():
    ragged = tf.ragged.constant([[1], [2, 3], [], [4, 5, 6], [7], [8, 9], [10]], tf.int64)
    return tf.data.Dataset.zip(
        {
            "dense": tf.data.Dataset.from_tensor_slices(np.ones((7, 2, 3), "float32")),
            "ragged": tf.data.Dataset.from_tensor_slices(ragged),
            "sparse": tf.data.Dataset.from_tensor_slices(tf.sparse.eye(7, 4)),
            "text": tf.data.Dataset.from_tensor_slices([f"{n}" for n in range(7)]),
            "flag": tf.data.Dataset.from_tensor_slices([True, False] * 3 + [True]),
        }
    )


@pytest.mark.full
def test_elements_of_every_type(strategy):
    """Ragged and sparse tensors, texts and flags, in dictionaries and tuples."""
    dataset = strategy.experimental_distribute_dataset(
        structured().batch(BATCH).map(lambda batch: (batch, batch["dense"]))
    )

    def of_a_replica(batch, dense):
        return (
            tf.reduce_sum(dense + batch["dense"]),
            tf.reduce_sum(batch["ragged"]),
            tf.reduce_sum(batch["sparse"].values),
            tf.strings.length(tf.strings.reduce_join(batch["text"])),
            tf.reduce_sum(tf.cast(batch["flag"], tf.int32)),
        )

    @tf.function
    def loop(dataset):
        totals = (0.0, tf.constant(0, tf.int64), 0.0, 0, 0)
        for batch in dataset:
            found = strategy.run(of_a_replica, args=batch)
            found = [strategy.reduce("SUM", each, axis=None) for each in found]
            totals = tuple(total + each for total, each in zip(totals, found))  # noqa: B905
        return totals

    assert [float(total) for total in loop(dataset)] == [84.0, 55.0, 4.0, 7.0, 4.0]


@pytest.mark.full
def test_sizes_that_change_with_each_batch(strategy):
    """Functions of the number of rows, which differs between replicas and steps."""
    dataset = distribute(strategy, np.arange(10, dtype=np.int64), 4)

    @tf.function
    def loop(iterator):
        found = tf.TensorArray(tf.int32, 0, dynamic_size=True)
        for batch in iterator:
            rows = strategy.run(
                lambda part: tf.size(tf.reshape(part, [-1, 1]))[None], args=(batch,)
            )
            found = found.write(found.size(), strategy.gather(rows, axis=0))
        return found.concat()

    rows = loop(iter(dataset)).numpy().reshape(3, 3)
    assert rows.sum(axis=1).tolist() == [4, 4, 2]
    assert (rows[:, 1] == 0).all() and (rows[:, 0] >= rows[:, 2]).all()


def test_nothing_keeps_an_input_that_nobody_has(strategy):
    dataset = distribute(strategy)
    iterator = iter(dataset)

    @tf.function(autograph=False)  # AutoGraph keeps frames that it has seen
    def step(iterator):
        return summed(strategy, next(iterator))

    step(iterator)
    numbers = {step_iterator.number_of(dataset), step_iterator.number_of(iterator)}
    known = weakref.ref(iterator)
    del dataset, iterator
    gc.collect()
    assert known() is None and not numbers & set(step_iterator._inputs)


def average_losses(strategy, samples, **options):
    losses = []

    def step(batch):
        return tf.nn.compute_average_loss(tf.square(batch), **options)

    @tf.function
    def run(batch):
        return strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None)

    for batch in distribute(strategy, samples):
        losses.append(float(run(batch)))
    return losses


@pytest.mark.quick("3_0_1")
@pytest.mark.parametrize(
    "shares",
    [(3, 0, 1), (1, 1, 1), (0, 1, 0), (5, 2, 1)],
    ids=lambda shares: "_".join(map(str, shares)),
)
def test_average_loss_divides_by_the_samples_of_all_replicas(strategy, shares):
    strategy.set_share_weights(shares)
    samples = np.arange(7, dtype=np.float64)
    expected = [np.mean(np.square(samples[at : at + BATCH])) for at in (0, 3, 6)]
    np.testing.assert_allclose(average_losses(strategy, samples), expected, rtol=1e-12)
    given = average_losses(strategy, samples, global_batch_size=BATCH)
    np.testing.assert_allclose(given, [*expected[:2], 12.0], rtol=1e-12)


def test_average_loss_of_other_strategies_is_tensorflows(strategy):
    stock = stock_strategy()
    values = stock.run(lambda: tf.nn.compute_average_loss(tf.constant([1.0, 2.0])))
    assert float(stock.experimental_local_results(values)[0]) == 0.5
    assert float(tf.nn.compute_average_loss(tf.constant([1.0, 2.0]))) == 1.5
    with strategy.scope(), pytest.raises(RuntimeError, match="cross replica context"):
        tf.nn.compute_average_loss(tf.constant([1.0, 2.0]))


def test_a_name_that_was_imported_before_is_no_other_function(strategy):
    values = strategy.run(lambda: IMPORTED_BY_NAME(tf.constant([1.0, 2.0])))
    assert float(strategy.experimental_local_results(values)[0]) == 0.5
    values = strategy.run(lambda: IMPORTED_BY_NAME(tf.constant([1.0, 2.0]), global_batch_size=3))
    assert float(strategy.experimental_local_results(values)[0]) == 1.0


def values(strategy, function):
    return strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(function(context.replica_id_in_sync_group))
    )


@pytest.mark.parametrize("operation", ["SUM", "MEAN"])
@pytest.mark.parametrize("axis", [None, 0])
def test_reduce_is_that_of_mirrored_strategy(logical_devices, operation, axis):
    three_replicas().set_share_weights((4, 2, 1))
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
    strategy.set_share_weights(weights)
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
    strategy.set_share_weights((4, 2, 1))
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
