"""Which workers are summed by host; tests/multi_process has the sums."""

import pytest
import tensorflow as tf

from keras_het.strategy.extended import _hosts_of
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
