"""The throughput model: known curves are found again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_het.planning.loader import JobModel, ThroughputModel

JOB = JobModel(0.080, 0.005, cpu_seconds=0.002, serial_seconds=0.001)


def fed(job, numbers):
    model = ThroughputModel()
    for loaders in numbers:
        supply = job.supply(loaders)
        model.observe(loaders, supply, 0.5, job.device_seconds, job.cpu_seconds)
    return model


def test_nothing_is_known_at_first():
    model = ThroughputModel()
    assert not model.is_fitted
    model.observe(2, 100.0, 0.0, 0.01, None)
    assert not model.is_fitted, "a device that does not wait says nothing about loaders"


def test_one_number_of_loaders_gives_the_time_of_one():
    job = JobModel(0.080, 0.005)
    found = fed(job, [2]).job
    assert found.loader_seconds == pytest.approx(0.080)
    assert found.serial_seconds == 0.0
    assert found.device_seconds == 0.005


def test_two_numbers_give_the_serial_part_too():
    found = fed(JOB, [2, 8]).job
    assert found.loader_seconds == pytest.approx(0.080)
    assert found.serial_seconds == pytest.approx(0.001)
    assert found.cpu_seconds == 0.002


def test_more_loaders_that_are_no_faster_are_a_serial_part():
    model = ThroughputModel()
    for loaders, rate in ((2, 50.0), (8, 49.0)):
        model.observe(loaders, rate, 0.5, 0.001, None)
    assert model.job.throughput(64) < 55.0


def test_a_changed_job_is_learned_again():
    model = fed(JOB, [2, 8])
    model.forget()
    assert not model.is_fitted
    model.observe(4, 400.0, 0.5, 0.001, 0.001)
    assert model.job.loader_seconds == pytest.approx(0.010)


@given(
    load=st.floats(1e-4, 1.0),
    device=st.floats(1e-4, 1.0),
    cpu=st.floats(0.0, 0.1),
    serial=st.floats(0.0, 0.1),
)
def test_throughput_grows_with_loaders_and_keeps_below_both_bounds(load, device, cpu, serial):
    job = JobModel(load, device, min(cpu, load), serial)
    rates = [job.throughput(n, cpus=4.0) for n in (1, 2, 4, 8, 64)]
    assert rates == sorted(rates)
    assert rates[-1] <= 1.0 / device * (1 + 1e-9)
    assert rates[0] <= job.supply(1, 4.0) * (1 + 1e-9)


def test_enough_loaders_grow_with_the_speed_of_the_device():
    numbers = [JobModel(0.080, device).enough_loaders(128) for device in (0.040, 0.010, 0.0025)]
    assert numbers == sorted(numbers)
    assert numbers[0] >= 2
    assert numbers[2] >= 32
    assert JobModel(0.080, 0.0025).enough_loaders(10) == 10
