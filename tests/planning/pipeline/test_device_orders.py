"""Orders of devices: hosts stay whole, fast links first, and no order twice."""

import itertools
import math

import numpy as np
from pipeline_plants import even_devices, even_profile, random_case

from keras_het.planning.pipeline import Devices
from keras_het.planning.pipeline.refinement import device_orders


def test_equal_hosts_have_one_order():
    assert device_orders(even_profile(2, 4), even_devices(4, (0, 0, 1, 1))) == [(0, 1, 2, 3)]


def test_all_orders_of_unequal_hosts_and_the_fastest_device_first():
    profile, devices = random_case(np.random.default_rng(0), 4, 7, False)
    orders = device_orders(profile, devices)
    hosts = len(set(devices.hosts))
    assert 1 < len(orders) <= math.factorial(hosts)
    seconds = (profile.forward_seconds + profile.backward_seconds).sum(axis=0)
    for order in orders:
        assert sorted(order) == list(range(7))
        pairs = list(itertools.pairwise(order))
        changes = [devices.hosts[before] != devices.hosts[after] for before, after in pairs]
        assert sum(changes) == hosts - 1
        for (before, after), other in zip(pairs, changes, strict=True):
            assert other or seconds[before] <= seconds[after]


def test_many_hosts_follow_their_fastest_links():
    number = 9
    hidden = np.random.default_rng(1).permutation(number)
    distance = np.abs(np.argsort(hidden)[:, None] - np.argsort(hidden))
    devices = Devices(
        tuple(map(str, range(number))),
        tuple(range(number)),
        10.0 ** -distance.astype(float),
        np.zeros((number, number)),
        np.full(number, np.inf),
    )
    orders = device_orders(even_profile(4, number, cut=1.0), devices)
    assert orders[0] in (tuple(hidden.tolist()), tuple(hidden[::-1].tolist()))
    assert len(orders) <= 2 * number
