"""Which workers are summed by host, and how many collectives TensorFlow counts for any training."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from keras_het import private_api
from keras_het.strategy.extended import _hosts_of
from keras_het.strategy.hierarchical_all_reduce import HierarchicalAllReduce
from keras_het.strategy.sums_by_host import is_worth_it


@pytest.mark.parametrize(
    ("addresses", "hosts", "is_by_host"),
    [
        (["a:1", "a:2", "b:1", "b:2"], [0, 0, 1, 1], True),
        (["b:1", "a:1", "b:2"], [0, 1, 0], True),
        (["a:1", "a:2"], [0, 0], False),
        (["a:1", "b:1", "c:1"], [0, 1, 2], False),
        (["[::1]:1", "[::1]:2", "[::2]:1"], [0, 0, 1], True),
        (["a:1"], [0], False),
    ],
)
def test_workers_are_summed_by_host_where_some_share_one_and_others_do_not(
    addresses, hosts, is_by_host
):
    assert _hosts_of(tf.train.ClusterSpec({"worker": addresses})) == hosts
    assert is_worth_it(hosts) == is_by_host


def test_the_chief_comes_first():
    spec = tf.train.ClusterSpec({"worker": ["a:1", "b:1"], "chief": ["b:2"]})
    assert _hosts_of(spec) == [0, 1, 0]


GROUPS = itertools.count(7_000)


@pytest.fixture
def collectives(logical_devices):
    keys = private_api.CollectiveKeys(group_key_start=next(GROUPS))
    device = tf.config.list_logical_devices("CPU")[0].name
    device = tf.DeviceSpec.from_string(device).replace(job="localhost", replica=0, task=0)
    return HierarchicalAllReduce(
        (device.to_string(),), 1, 1, private_api.CommunicationOptions(), keys, 0
    )


@pytest.fixture
def numbered(collectives, monkeypatch):
    """Each instance that TensorFlow was asked for."""
    found, keys = [], collectives._launchers[0]._collective_keys
    original = keys.get_instance_key

    def get_instance_key(*arguments):
        found.append(original(*arguments))
        return found[-1]

    monkeypatch.setattr(keys, "get_instance_key", get_instance_key)
    return found


def test_steps_share_instances_by_type_and_shape(collectives, numbered):
    reduce = collectives._launchers[0].all_reduce

    @tf.function
    def inner(value):
        return reduce(value)

    @tf.function
    def step(value):
        one = reduce(reduce(value) + 1.0)  # two of one kind
        return one, inner(one), reduce(tf.cast(value, tf.float64)), reduce(value[:2])

    value = np.arange(3, dtype=np.float32)
    for number in range(5):
        found = step(tf.constant(value + number))
        for one, expected in zip(found, [value + 1, value + 1, value, value[:2]], strict=True):
            np.testing.assert_array_equal(one, expected + number)
        np.testing.assert_array_equal(inner(tf.constant(value)), value)
        np.testing.assert_array_equal(reduce(tf.constant(value)), value)
    assert len(numbered) == len(set(numbered)) == 3


def test_gathers_and_exchanges_share_instances_of_their_own(collectives, numbered):
    launcher = collectives._launchers[0]

    @tf.function
    def step(value):
        gathered = launcher.all_gather_equal(launcher.all_gather_equal(value))
        return launcher.all_reduce(launcher.all_to_all(gathered))

    value = np.arange(3, dtype=np.float32)[None]
    for number in range(5):
        np.testing.assert_array_equal(step(tf.constant(value + number)), value + number)
    assert len(numbered) == len(set(numbered)) == 3


def test_what_has_no_known_shape_has_an_instance_for_each_call(collectives, numbered):
    reduce = tf.function(
        collectives._launchers[0].all_reduce, input_signature=[tf.TensorSpec([None])]
    )
    for size in (1, 2, 3):
        np.testing.assert_array_equal(reduce(tf.ones([size])), np.ones(size))
    assert len(set(numbered)) == 3
