"""What each local worker is started with: variables, an emulated device, CPUs."""

import json
import math
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_het.launch.local.local_cluster import assign_cpus
from keras_het.launch.local.worker_environment import (
    Emulation,
    worker_environment,
)


def test_what_is_written_is_what_a_worker_reads():
    from keras_het.strategy.measure.emulated_device import read_emulated_devices

    emulation = Emulation((4.0, 2.0, 1.0), seconds_per_sample=0.008, fixed_seconds=0.5)
    for index, seconds in enumerate([0.002, 0.004, 0.008]):
        devices = read_emulated_devices(emulation.environment_of(index))
        assert devices is not None
        (device,) = devices
        assert device.speed == emulation.speeds[index]
        assert math.isclose(device.time_model.seconds(10), 0.5 + 10 * seconds)


@pytest.mark.parametrize("speeds", [(), (0.0,), (1.0, -1.0), (float("nan"),), (float("inf"),)])
def test_refuses_bad_speeds(speeds):
    with pytest.raises(ValueError, match=r"positive finite speeds.*Received: speeds="):
        Emulation(speeds)


@pytest.mark.parametrize("name", ["seconds_per_sample", "fixed_seconds"])
def test_refuses_bad_times(name):
    with pytest.raises(ValueError, match=rf"`{name}` must be finite and at least 0"):
        Emulation((1.0,), **{name: -1.0})


def test_environment_keeps_what_the_user_set():
    inherited = {
        "TF_NUM_INTRAOP_THREADS": "7",
        "PYTHONUNBUFFERED": "",
        "TF_CONFIG": "old",
        "KERAS_HET_EMULATED_DEVICES": "by hand",
        "OTHER": "kept",
    }
    own = worker_environment(1, ["127.0.0.1:1", "127.0.0.1:2"], 3, inherited)
    assert own["TF_NUM_INTRAOP_THREADS"] == "7"
    assert own["PYTHONUNBUFFERED"] == ""
    assert own["OTHER"] == "kept"
    assert own["KERAS_HET_EMULATED_DEVICES"] == "by hand"
    assert (own["TF_NUM_INTEROP_THREADS"], own["OMP_NUM_THREADS"]) == ("3", "3")
    assert json.loads(own["TF_CONFIG"]) == {
        "cluster": {"worker": ["127.0.0.1:1", "127.0.0.1:2"]},
        "task": {"type": "worker", "index": 1},
    }


def test_environment_defaults():
    from keras_het.strategy.measure.emulated_device import read_emulated_devices

    own = worker_environment(0, ["127.0.0.1:1"], 1, {}, Emulation((2.0,)))
    assert own["TF_NUM_INTRAOP_THREADS"] == "1"
    assert own["TF_NUM_INTEROP_THREADS"] == "3"  # the emulated device waits in one
    real = worker_environment(0, ["127.0.0.1:1"], 1, {})
    assert real["TF_NUM_INTEROP_THREADS"] == "2"
    assert real["KERAS_BACKEND"] == "tensorflow"  # a keras.json must not decide
    assert own["PYTHONUNBUFFERED"] == "1"
    assert read_emulated_devices(own) is not None


needs_affinity = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="this system cannot bind processes to CPUs"
)


@needs_affinity
def test_known_assignments():
    assert assign_cpus(2, [0, 1, 2, 5]) == (((0, 2), (1, 5)), (2, 2))
    assert assign_cpus(2, [0, 1, 2]) == (((0, 2), (1,)), (2, 1))
    assert assign_cpus(3, [0, 1]) == (None, (1, 1, 1))
    assert assign_cpus(3, [0, 1], pin=True) == (((0,), (1,), (0,)), (1, 1, 1))
    assert assign_cpus(2, [0, 1], pin=False) == (None, (1, 1))
    assert assign_cpus(2, [0, 1, 2], cpus_per_worker=1) == (((0,), (1,)), (1, 1))
    assert assign_cpus(2, [0, 1, 2], cpus_per_worker=2) == (None, (2, 2))
    assert assign_cpus(2, [0, 1, 2], 2, pin=True) == (((0, 1), (2, 0)), (2, 2))


def test_a_quota_is_divided_into_threads():
    def threads(usable, **options):
        return assign_cpus(3, range(10), usable=usable, **options)[1]

    assert threads(10.0) == (4, 3, 3)
    assert threads(9.5) == (3, 3, 3)
    assert threads(7.0) == (2, 2, 2)
    assert threads(1.5) == (1, 1, 1)
    assert threads(1.5, cpus_per_worker=2) == (2, 2, 2)


@needs_affinity
@given(st.integers(1, 9), st.integers(1, 9))
def test_every_cpu_is_dealt_once_and_every_worker_has_one(workers, cpus):
    cpu_sets, sizes = assign_cpus(workers, range(cpus), pin=True)
    assert cpu_sets is not None
    dealt = [cpu for own in cpu_sets for cpu in own]
    assert set(dealt) == set(range(cpus))
    assert len(dealt) == max(workers, cpus)
    assert all(cpu_sets)
    assert max(sizes) - min(sizes) <= 1
    assert (assign_cpus(workers, range(cpus))[0] is not None) == (workers <= cpus)


def test_says_when_the_system_cannot_pin(monkeypatch):
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    assert assign_cpus(1, [0])[0] is None
    with pytest.raises(ValueError, match="cannot bind processes to CPUs"):
        assign_cpus(1, [0], pin=True)
