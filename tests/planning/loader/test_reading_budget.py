"""Simulated jobs that divide the reading threads that a user gave their host."""

import itertools

import pytest
from reading_jobs import Host, Job, throughput

# A disk that is busy 10 ms with a batch gives 100 batches/s; one thread alone reads 20.
DISK = {"disk_seconds": 0.010, "wait_seconds": 0.040}
LONG = 240.0


def hungry(name, device_seconds=0.005):
    return Job(name, **DISK, device_seconds=device_seconds)


def trained(*jobs, io_budget, noise=0.0):
    host = Host(list(jobs), io_budget, noise)
    host.run(LONG)
    return host


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_a_budget_is_kept_and_divided_by_need(noise):
    host = trained(hungry("fast"), hungry("slow", 0.020), io_budget=10, noise=noise)
    _, parts = host.parts[-1]
    assert sum(parts.values()) == 10
    assert sum(job.loaders for job in host.jobs) <= 10
    assert parts["fast"] >= 2 * parts["slow"]
    fast, slow = (throughput(job, LONG / 2, LONG) for job in host.jobs)
    assert fast + slow >= 95.0
    assert fast >= 2 * slow


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.3])
def test_a_division_does_not_follow_noise(noise):
    host = trained(hungry("fast"), hungry("slow", 0.020), io_budget=10, noise=noise)
    late = [parts for when, parts in host.parts if when > 30.0]
    changes = sum(before != after for before, after in itertools.pairwise(late))
    assert len(late) > 200
    assert changes <= 2


def test_a_budget_holds_for_a_job_alone():
    host = trained(hungry("a"), io_budget=3)
    assert host.jobs[0].loaders <= 3
    assert throughput(host.jobs[0], LONG / 2, LONG) == pytest.approx(3 * 20.0, rel=0.05)


def test_a_job_that_computes_is_not_bounded_and_takes_no_thread():
    computing = Job("c", 0.0, 0.0, 0.002, cpu_seconds=0.009)
    host = trained(hungry("a"), hungry("b"), computing, io_budget=4)
    assert host.parts[-1][1] == {"a": 2, "b": 2}
    assert computing.loaders > 4
