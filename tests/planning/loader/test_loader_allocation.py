"""Division of a host among jobs, against brute force."""

import itertools

import numpy as np
import pytest
from depth import examples
from hypothesis import given
from hypothesis import strategies as st

from keras_het.planning.loader import JobModel, allocate_loaders


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


def test_two_equal_jobs_get_the_same():
    job = JobModel(0.040, 0.004, cpu_seconds=0.040)
    assert allocate_loaders([job, job], 8.0) == (4, 4)


def test_a_faster_device_gets_more():
    slow = JobModel(0.040, 0.020, cpu_seconds=0.040)
    fast = JobModel(0.040, 0.005, cpu_seconds=0.040)
    of_slow, of_fast = allocate_loaders([slow, fast], 10.0)
    assert of_fast >= 2 * of_slow


def test_a_larger_weight_gets_more():
    light = JobModel(0.040, 0.004, cpu_seconds=0.040, weight=1.0)
    heavy = JobModel(0.040, 0.004, cpu_seconds=0.040, weight=4.0)
    of_light, of_heavy = allocate_loaders([light, heavy], 10.0)
    assert of_heavy > of_light


def test_loaders_that_only_wait_may_outnumber_the_cpus():
    waiting = JobModel(0.080, 0.005, cpu_seconds=0.0008)
    assert allocate_loaders([waiting], 2.0)[0] >= 16


def test_what_nobody_gains_from_stays_idle():
    satisfied = JobModel(0.001, 0.050, cpu_seconds=0.001)
    assert sum(allocate_loaders([satisfied, satisfied], 64.0)) <= 4


def test_more_jobs_than_cpus_get_one_each():
    job = JobModel(0.040, 0.004, cpu_seconds=0.040)
    assert allocate_loaders([job] * 5, 2.0) == (1,) * 5


def test_no_job():
    assert allocate_loaders([], 2.0) == ()


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
