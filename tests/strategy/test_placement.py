"""A batch is on its devices before its step begins; logical CPUs stand for GPUs."""

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_het import HeterogeneousStrategy
from keras_het.strategy.batches import uneven_per_replica
from keras_het.strategy.batches.uneven_per_replica import Placement
from keras_het.strategy.measure.memory_use import Memory

SECONDS = 60.0
DEVICES = ("CPU:1", "CPU:2")
rng = np.random.default_rng(1)
x, y = rng.normal(size=[44, 3]), rng.normal(size=[44, 1])


@pytest.fixture(autouse=True)
def ahead(monkeypatch, logical_devices):
    """What was copied while a step was computed, by the last characters of its device."""
    monkeypatch.setenv(uneven_per_replica.SWITCH, "1")
    copied, copy = [], Placement.ahead

    def ahead(self, parts):
        parts = copy(self, parts)
        copied.append([part[0].backing_device[-5:] for part in parts])
        return parts

    monkeypatch.setattr(Placement, "ahead", ahead)
    return copied


def strategy(**options):
    return HeterogeneousStrategy(devices=DEVICES, share_weights=[3, 1], **options)


def trained(inputs=None, **options):
    """Weights after two epochs in which the shares change."""
    own_strategy = strategy()
    with own_strategy.scope():
        model = keras.Sequential([keras.Input([3]), keras.layers.Dense(2), keras.layers.Dense(1)])
        model.compile("adam", "mse", **options)
    for place, variable in enumerate(model.variables):
        variable.assign(tf.ones_like(variable.value) / (2 + place))
    change = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: own_strategy.set_share_weights([1, 1 + batch])
    )
    data = (x, y) if inputs is None else (inputs(),)
    sizes = {"batch_size": 8} if inputs is None else {}
    model.fit(*data, epochs=2, shuffle=False, verbose=0, callbacks=[change], **sizes)
    return model.get_weights()


def rows():
    return tf.data.Dataset.from_tensor_slices((x.astype(np.float32), y.astype(np.float32)))


def generated():
    for start in range(0, 88, 8):
        at = slice(start % 44, start % 44 + 8)
        yield x[at], y[at]


INPUTS = {
    "arrays": None,
    "whole batches": lambda: rows().batch(8),
    "maps of samples": lambda: rows().map(lambda a, b: (2 * a, b)).shuffle(9, seed=3).batch(8),
    "unknown length": lambda: rows().filter(lambda a, b: a[0] < 1).batch(8),
}


@pytest.mark.full
@pytest.mark.parametrize("kind", INPUTS)
def test_the_numbers_are_the_same(kind, ahead, monkeypatch):
    found = trained(INPUTS[kind])
    assert len(ahead) >= 4 and {tuple(each) for each in ahead} == {DEVICES}
    monkeypatch.setenv(uneven_per_replica.SWITCH, "0")
    ahead.clear()
    for ours, expected in zip(found, trained(INPUTS[kind]), strict=True):
        np.testing.assert_array_equal(ours, expected)
    assert not ahead


def test_the_next_batch_is_copied_before_it_is_asked_for(ahead):
    own_strategy = strategy()
    parts = iter(own_strategy.experimental_distribute_dataset(rows().batch(8)))
    for _ in range(2):
        batch = next(parts)
    third = parts._run.held.ahead
    third.result(SECONDS)
    assert ahead == [list(DEVICES)]
    values = batch[0].host_values
    assert [each.backing_device[-5:] for each in values] == list(DEVICES)
    again = Placement(DEVICES)(list(values))
    assert all(one is other for one, other in zip(again, values, strict=True))


def test_a_generator_is_not_read_ahead(ahead):
    data = tf.data.Dataset.from_generator(
        generated, output_signature=(tf.TensorSpec([None, 3]), tf.TensorSpec([None, 1]))
    )
    own_strategy = strategy()
    parts = iter(own_strategy.experimental_distribute_dataset(data))
    for _ in range(3):
        batch = next(parts)
    assert not ahead and batch[0].host_values[1].backing_device.endswith("CPU:2")


def test_errors_and_the_end_come_where_they_belong():
    def failing(a, b):
        return tf.debugging.check_numerics(a, "not a number here"), b

    bad = x.astype(np.float32)
    bad[27] = np.nan
    data = tf.data.Dataset.from_tensor_slices((bad, y.astype(np.float32))).batch(8).map(failing)
    own_strategy = strategy()
    parts = iter(own_strategy.experimental_distribute_dataset(data))
    for _ in range(3):
        next(parts)
    with pytest.raises(tf.errors.InvalidArgumentError, match="not a number here"):
        next(parts)
    own_strategy = strategy()
    assert len(list(own_strategy.experimental_distribute_dataset(rows().batch(8)))) == 6


def test_a_pass_that_is_left_while_its_next_batch_is_awaited_ends():
    may_go_on, waits = threading.Event(), threading.Event()

    def wait(a, b):
        if len(a) and a[0, 0] == 0:
            waits.set()
            assert may_go_on.wait(SECONDS)
        return a

    held = x.astype(np.float32)
    held[24] = 0
    data = tf.data.Dataset.from_tensor_slices((held, y.astype(np.float32))).batch(8)
    data = data.map(
        lambda a, b: (tf.ensure_shape(tf.numpy_function(wait, [a, b], a.dtype), [None, 3]), b)
    )
    own_strategy = strategy()
    distributed = own_strategy.experimental_distribute_dataset(data)
    parts = iter(distributed)
    for _ in range(3):
        next(parts)
    run = parts._run
    assert waits.wait(SECONDS)
    run.close()
    may_go_on.set()
    run.held.ahead.result(SECONDS)
    assert len(list(distributed)) == 6


@pytest.mark.full
def test_graphs_and_executions_take_batches_from_the_host(ahead):
    trained(steps_per_execution=2)
    own = strategy()
    distributed = own.experimental_distribute_dataset(rows().batch(8))

    @tf.function
    def total():
        sums = tf.zeros([])
        for a, _ in distributed:
            sums += own.reduce("SUM", own.run(tf.reduce_sum, (a,)), axis=None)
        return sums

    np.testing.assert_allclose(total(), x.sum(), rtol=1e-4)
    assert not ahead


@pytest.mark.parametrize("free", [10_000, 10])
def test_where_memory_is_short_a_step_copies_its_own_batch(free, monkeypatch):
    memory = Memory(current=0, peak=9_000 - free, limit=10_000)
    monkeypatch.setattr(uneven_per_replica, "memory_of", lambda _: memory)
    parts = [[tf.ones([4, 3])], [tf.ones([2, 3])]]
    found = Placement(DEVICES).ahead(parts)
    assert (found is parts) == (free == 10)


def test_text_and_integers_of_32_bits_stay_on_the_host():
    part = {"text": tf.constant(["a"]), "short": tf.constant([1]), "absent": None}
    (placed,) = Placement(["CPU:3"])([part])
    assert placed["text"] is part["text"] and placed["short"] is part["short"]


@pytest.mark.parametrize(
    ("setting", "devices", "expected"),
    [
        (None, ["CPU:0"], False),
        (None, ["GPU:0", "GPU:1"], True),
        ("0", ["GPU:0"], False),
        ("1", ["CPU:0"], True),
    ],
)
def test_copies_are_made_where_there_are_gpus(setting, devices, expected, monkeypatch):
    monkeypatch.delenv(uneven_per_replica.SWITCH)
    if setting is not None:
        monkeypatch.setenv(uneven_per_replica.SWITCH, setting)
    assert uneven_per_replica.is_worthwhile(devices) == expected
