"""Division of reading threads, against brute force; which jobs read."""

import itertools

import pytest
from depth import examples
from hypothesis import given
from hypothesis import strategies as st

from keras_het.planning.loader import LoaderWindow, ReadingJob, allocate_readers
from keras_het.planning.loader.reader_allocation import fair_threads


def value(needs, parts):
    """Sum of r f(n / r), f(u) = (u^-4 + 1)^(-1/4)."""
    return sum(
        need * ((part / need) ** -4 + 1.0) ** -0.25 for need, part in zip(needs, parts, strict=True)
    )


@examples(150)
@given(needs=st.lists(st.floats(0.1, 40.0), min_size=1, max_size=3), threads=st.integers(3, 14))
def test_division_is_as_good_as_the_best_of_all(needs, threads):
    found = allocate_readers(needs, threads)
    choices = itertools.product(range(1, threads + 1), repeat=len(needs))
    best = max(value(needs, choice) for choice in choices if sum(choice) <= threads)
    assert min(found) >= 1
    assert sum(found) <= threads
    assert value(needs, found) >= best - 1e-9 * best


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


@pytest.mark.parametrize(
    ("needs", "threads", "parts"),
    [
        ([8.0, 8.0], 5, (3, 3)),
        ([8.0, 8.4, 7.9], 4, (2, 2, 2)),
        ([8.0, 8.0], 6, (3, 3)),
        ([40.0, 10.0], 10, (8, 2)),
        ([5.0], 7, (7,)),
    ],
)
def test_jobs_of_the_same_need_can_have_equally_many(needs, threads, parts):
    assert fair_threads(needs, threads) == sum(parts)
    assert allocate_readers(needs, sum(parts)) == parts


@pytest.mark.parametrize(("needs", "threads"), [([1.0], 0), ([0.0], 4), ([float("nan")], 4)])
def test_nothing_to_divide_is_refused(needs, threads):
    with pytest.raises(ValueError, match="There must be threads"):
        allocate_readers(needs, threads)


def window(cpu, queue=0.0, idle=0.5, seconds=10.0):
    return LoaderWindow(100, seconds, idle * seconds, 1.0, cpu, loader_queue_seconds=queue)


@pytest.mark.parametrize(
    ("cpu", "queue", "reads"),
    [
        pytest.param(1.0, 0.0, True, id="waits"),
        pytest.param(1.0, None, True, id="queue not known"),
        pytest.param(36.0, 0.0, False, id="computes"),
        pytest.param(18.0, 20.0, False, id="waits for a CPU"),
        pytest.param(None, None, False, id="not known"),
    ],
)
def test_a_job_reads_if_its_loaders_neither_run_nor_queue(cpu, queue, reads):
    job = ReadingJob()
    job.observe(4, window(cpu, queue))
    assert job.reads == reads


def test_a_device_that_does_not_wait_tells_nothing_of_its_loaders():
    job = ReadingJob()
    job.observe(4, window(1.0, idle=0.0))
    assert not job.reads
    job.observe(4, window(1.0))
    job.observe(4, window(0.0, idle=0.0))
    assert job.reads


def test_a_job_on_the_border_stays_what_it_was():
    job = ReadingJob()
    job.observe(4, window(22.0))
    assert not job.reads
    job.observe(4, window(18.0))
    job.observe(4, window(22.0))
    assert job.reads
    job.observe(4, window(26.0))
    assert not job.reads
