"""Division of a host's CPUs and of its reading threads among jobs, against brute force."""

import itertools

import numpy as np
import pytest
from depth import examples
from hypothesis import given
from hypothesis import strategies as st

from keras_het.planning.loader import JobModel, allocate_loaders, allocate_readers


def value(jobs, loaders):
    return sum(
        job.weight * job.throughput(n) / job.throughput(1e9)
        for job, n in zip(jobs, loaders, strict=True)
    )


def best_value(jobs, slots):
    choices = itertools.product(range(1, slots + 1), repeat=len(jobs))
    return max(value(jobs, choice) for choice in choices if sum(choice) <= slots)


computing = st.builds(
    lambda work, device, weight: JobModel(work, device, cpu_seconds=work, weight=weight),
    work=st.floats(0.001, 0.1),
    device=st.floats(0.001, 0.05),
    weight=st.floats(0.1, 4.0),
)


@examples(150)
@given(jobs=st.lists(computing, min_size=1, max_size=3), slots=st.integers(3, 9))
def test_is_as_good_as_the_best_of_all_divisions(jobs, slots):
    found = allocate_loaders(jobs, slots, min_gain=0.0)
    assert sum(found) <= slots
    assert min(found) >= 1
    assert value(jobs, found) >= best_value(jobs, slots) - 1e-6


def test_jobs_get_loaders_by_their_device_and_weight():
    def computing(device_seconds, weight=1.0):
        return JobModel(0.040, device_seconds, cpu_seconds=0.040, weight=weight)

    assert allocate_loaders([computing(0.004)] * 2, 8.0) == (4, 4)
    of_slow, of_fast = allocate_loaders([computing(0.020), computing(0.005)], 10.0)
    assert of_fast >= 2 * of_slow
    of_light, of_heavy = allocate_loaders([computing(0.004), computing(0.004, 4.0)], 10.0)
    assert of_heavy > of_light
    assert allocate_loaders([computing(0.004)] * 5, 2.0) == (1,) * 5
    assert allocate_loaders([], 2.0) == ()


def test_loaders_that_only_wait_may_outnumber_the_cpus():
    waiting = JobModel(0.080, 0.005, cpu_seconds=0.0008)
    assert allocate_loaders([waiting], 2.0)[0] >= 16


def test_what_nobody_gains_from_stays_idle():
    satisfied = JobModel(0.001, 0.050, cpu_seconds=0.001)
    assert sum(allocate_loaders([satisfied, satisfied], 64.0)) <= 4


def test_a_host_without_cpus_is_refused():
    with pytest.raises(ValueError, match="cpus=0"):
        allocate_loaders([JobModel(0.1, 0.1)], 0)


def test_many_jobs_are_divided_quickly_and_completely():
    random = np.random.default_rng(0)
    jobs = [
        JobModel(work, device, cpu_seconds=work)
        for work, device in zip(
            random.uniform(0.05, 0.5, 40), random.uniform(0.001, 0.01, 40), strict=True
        )
    ]
    assert sum(allocate_loaders(jobs, 256.0)) == 256


# --- reading threads


def value_of_threads(needs, parts):
    """Sum of r f(n / r), f(u) = (u^-4 + 1)^(-1/4)."""
    return sum(
        need * ((part / need) ** -4 + 1.0) ** -0.25 for need, part in zip(needs, parts, strict=True)
    )


@examples(150)
@given(needs=st.lists(st.floats(0.1, 40.0), min_size=1, max_size=3), threads=st.integers(3, 14))
def test_division_is_as_good_as_the_best_of_all(needs, threads):
    found = allocate_readers(needs, threads)
    choices = itertools.product(range(1, threads + 1), repeat=len(needs))
    best = max(value_of_threads(needs, choice) for choice in choices if sum(choice) <= threads)
    assert min(found) >= 1
    assert sum(found) <= threads
    assert value_of_threads(needs, found) >= best - 1e-9 * best


@pytest.mark.parametrize(
    ("needs", "threads", "parts"),
    [
        ([8.0, 8.0], 8, (4, 4)),
        ([40.0, 10.0], 10, (8, 2)),
        # far beyond what there is, and far below
        ([6400.0, 1600.0], 10, (8, 2)),
        ([40.0, 0.1], 10, (9, 1)),
        ([5.0], 7, (7,)),
        ([9.0, 9.0, 9.0], 2, (1, 1, 1)),
        ([], 4, ()),
    ],
)
def test_devices_get_threads_by_what_they_need(needs, threads, parts):
    assert allocate_readers(needs, threads) == parts


@pytest.mark.parametrize(("needs", "threads"), [([1.0], 0), ([0.0], 4), ([float("nan")], 4)])
def test_nothing_to_divide_is_refused(needs, threads):
    with pytest.raises(ValueError, match="There must be threads"):
        allocate_readers(needs, threads)
