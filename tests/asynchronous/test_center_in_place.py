"""Whether a push changes the center where it is, and what happens if it may not stay finite."""

import numpy as np
import pytest
import tensorflow as tf
from addresses import free_address
from service_doubles import exchange_within

from keras_het.asynchronous.parameter_service import ParameterService, Partitions, credential
from keras_het.asynchronous.parameter_service.part import LARGEST_NORM
from keras_het.asynchronous.rules import Delta

SIZE = 4000


def start(rule):
    proof = credential(b"0123456789abcdef", "model")
    service = ParameterService(free_address(), Partitions(((SIZE,),)), rule, proof, 1)
    service.start()
    return service


def place(service):
    """Address of the center in memory."""
    (center,) = service.center_partitions()
    return np.asarray(memoryview(center)).ctypes.data


def push(service, value):
    (answer,) = exchange_within(service, 0, 8.0, [tf.fill([SIZE], np.float32(value))])
    return np.array(answer)


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_the_center_is_changed_where_it_is(logical_devices, scale):
    service = start(Delta(scale))
    push(service, 1.0)
    before = place(service)
    for number in (2, 3):
        np.testing.assert_array_equal(push(service, 1.0), number * scale)
        assert place(service) == before
    service.close()


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_large_center_counts_whether_or_not_it_can_be_undone(logical_devices, factor):
    service = start(Delta())
    value = factor * LARGEST_NORM / SIZE**0.5
    np.testing.assert_array_equal(push(service, value), np.float32(value))
    np.testing.assert_array_equal(push(service, value), 2 * np.float32(value))
    np.testing.assert_array_equal(service.versions(), [2])
    service.close()


class FourthPower(Delta):
    """Adds another thing than `Delta` does, of which its bound says nothing."""

    name = "fourth_power"

    def update(self, center, slots, change, meta):
        return super().update(center, slots, change**4, meta)


def test_a_subclass_with_its_own_update_is_undone(logical_devices):
    service = start(FourthPower())
    np.testing.assert_array_equal(push(service, 2.0), 16.0)
    np.testing.assert_array_equal(push(service, 1e10), 16.0)
    np.testing.assert_array_equal(service.versions(), [1])
    np.testing.assert_array_equal(push(service, 1.0), 17.0)
    service.close()
