"""Pushes that may not stay finite: undone, or taken where the center is, without a pass over it."""

import numpy as np
import pytest
import tensorflow as tf
from service_doubles import exchange_within, start_service

from keras_het.asynchronous.parameter_service import Partitions, Status
from keras_het.asynchronous.parameter_service.part import (
    LARGEST_NORM,
    Change,
    Part,
    apply_rule,
    is_finite,
)
from keras_het.asynchronous.rules import Delta, PushMeta

SIZE = 4
LARGEST = float(np.finfo(np.float32).max)


@pytest.fixture
def part(logical_devices):
    with tf.device("CPU:0"):
        return Part(SIZE, Delta(), 1, "undo", has_center=True)


@pytest.fixture
def push(part):
    meta = PushMeta(0, tf.constant(1.0), tf.constant(0.0), tf.constant(0, tf.int64))
    run = tf.function(lambda change: apply_rule(Delta(), part, Change(change), meta)[0])
    return lambda *values: int(run(tf.constant(values, tf.float32)))


def center_norm(part):
    return np.linalg.norm(part.center.numpy().astype(np.float64))


def test_a_center_from_outside_is_measured_again(part, push):
    assert push(1, 1, 1, 1) == Status.OK
    part.set_center(tf.fill([SIZE], 1e10))
    assert push(1, 1, 1, 1) == Status.OK
    assert float(part.largest_norm) >= center_norm(part)
    part.set_center(tf.fill([SIZE], LARGEST / 8))  # the squares are not finite, the sum is
    assert push(*[LARGEST] * SIZE) == Status.NOT_FINITE
    np.testing.assert_array_equal(part.center, np.full(SIZE, LARGEST / 8, np.float32))
    assert int(part.version) == 2


def test_changes_that_cancel_are_taken_however_many(part, push):
    large = 0.4 * LARGEST_NORM / np.sqrt(SIZE)
    for count in range(12):
        assert push(*[large if count % 2 else -large] * SIZE) == Status.OK
    np.testing.assert_array_equal(part.center, np.zeros(SIZE))
    assert int(part.version) == 12
    assert (
        float(part.largest_norm) < LARGEST_NORM
    )  # measured again, so that nothing is kept to undo


def test_what_is_known_of_the_norm_is_never_below_it(part, push):
    random = np.random.default_rng(0)
    refused = 0
    for _ in range(300):
        size = random.choice([1.0, 1e10, 3e14, 1e19, 0.5 * LARGEST])
        values = (size * random.uniform(-1, 1, SIZE)).astype(np.float32)
        if random.uniform() < 0.1:
            part.set_center(values)
            continue
        before, version = part.center.numpy(), int(part.version)
        with np.errstate(over="ignore"):
            wanted = before + values
        is_taken = bool(is_finite(tf.constant(wanted)))
        assert push(*values) == (Status.OK if is_taken else Status.NOT_FINITE)
        np.testing.assert_array_equal(part.center, wanted if is_taken else before)
        assert int(part.version) == version + is_taken
        assert float(part.largest_norm) >= center_norm(part) * (1 - 1e-5)
        refused += not is_taken
    assert 0 < refused < 200


LENGTH = 4000


def start(rule):
    return start_service(Partitions(((LENGTH,),)), rule, num_clients=1)


def place(service):
    (center,) = service.center_partitions()
    return np.asarray(memoryview(center)).ctypes.data


def exchange(service, value):
    (answer,) = exchange_within(service, 0, 8.0, [tf.fill([LENGTH], np.float32(value))])
    return np.array(answer)


@pytest.mark.full
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_the_center_is_changed_where_it_is(logical_devices, scale):
    service = start(Delta(scale))
    exchange(service, 1.0)
    before = place(service)
    for number in (2, 3):
        np.testing.assert_array_equal(exchange(service, 1.0), number * scale)
        assert place(service) == before
    service.close()


class FourthPower(Delta):
    """Adds another thing than `Delta` does, of which its bound says nothing."""

    name = "fourth_power"

    def update(self, center, slots, change, meta):
        return super().update(center, slots, change**4, meta)


@pytest.mark.full
def test_a_subclass_with_its_own_update_is_undone(logical_devices):
    service = start(FourthPower())
    np.testing.assert_array_equal(exchange(service, 2.0), 16.0)
    exchange(service, 1e10)
    np.testing.assert_array_equal(service.center_partitions()[0], 16.0)
    np.testing.assert_array_equal(service.versions(), [1])
    np.testing.assert_array_equal(exchange(service, 1.0), 17.0)
    service.close()
