"""Which jobs read, how many threads they need, and how they divide those of their host."""

import itertools

import pytest
from reading_jobs import Host, Job, throughput

from keras_het.planning.loader import LoaderWindow, ReadingJob, ReadingNeed


def window(cpu=0.01, queue=0.0, idle=0.5, seconds=10.0, steps=100):
    return LoaderWindow(steps, seconds, idle * seconds, 1.0, cpu, loader_queue_seconds=queue)


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
    assert (ReadingJob().observe(4, window(cpu, queue), 0.0) is not None) == reads


def test_a_device_that_does_not_wait_tells_nothing_of_its_loaders():
    job = ReadingJob()
    assert job.observe(4, window(idle=0.0), 0.0) is None
    assert job.observe(4, window(), 0.0) is not None
    assert job.observe(4, window(0.0, idle=0.0), 0.0) is not None


def test_a_job_on_the_border_stays_what_it_was():
    job = ReadingJob()
    found = [job.observe(4, window(cpu), 0.0) is not None for cpu in (22.0, 18.0, 22.0, 26.0)]
    assert found == [False, True, True, False]


@pytest.mark.parametrize(
    ("loaders", "idle", "threads"), [(8, 0.5, 16.0), (8, 0.9, 80.0), (3, 1.0, 300.0)]
)
def test_a_need_is_what_would_keep_the_device_at_work(loaders, idle, threads):
    need = ReadingJob().observe(loaders, window(idle=idle), 0.0)
    assert need.threads == pytest.approx(threads)


def test_a_need_stays_unless_it_differs_by_a_quarter():
    job = ReadingJob()
    needs = [job.observe(10, window(idle=idle), 0.0).threads for idle in (0.5, 0.59, 0.42, 0.61)]
    assert needs == pytest.approx([20.0, 20.0, 20.0, 10 / 0.39])


def test_a_need_that_was_wrong_at_first_is_found_within_ten_seconds():
    """While buffers fill a device waits more than it will."""
    job = ReadingJob()
    assert job.observe(8, window(idle=0.95, seconds=0.1), 0.0).threads == pytest.approx(160.0)
    needs = [job.observe(8, window(idle=0.5, seconds=0.1), 0.0).threads for _ in range(100)]
    assert needs[-1] == pytest.approx(16.0, rel=0.35)


def test_a_short_window_that_differs_changes_nothing():
    job = ReadingJob()
    before = job.observe(8, window(idle=0.9), 0.0)
    assert job.observe(8, window(idle=0.99, seconds=0.1), 0.0).threads == before.threads
    assert job.observe(8, window(idle=0.5, seconds=0.1), 0.0).threads == before.threads


def test_what_a_job_needed_before_it_computed_is_forgotten():
    job = ReadingJob()
    job.observe(8, window(idle=0.9), 0.0)
    assert job.observe(8, window(60.0), 0.0) is None
    assert job.observe(8, window(idle=0.5, seconds=0.1), 0.0).threads == pytest.approx(16.0)


@pytest.mark.parametrize(
    ("seconds", "steps", "until"),
    [
        pytest.param(1.0, 100, 15.0, id="short"),
        pytest.param(30.0, 3000, 120.0, id="long windows"),
        # of 24 loaders a move uses up to 48 batches of before, and has no window meanwhile
        pytest.param(6.0, 12, 60.0, id="a move of long steps"),
    ],
)
def test_a_job_that_may_validate_or_move_reads_for_a_while(seconds, steps, until):
    need = ReadingJob().observe(24, window(0.1, seconds=seconds, steps=steps), 1000.0)
    assert need.until == pytest.approx(1000.0 + until)


@pytest.mark.parametrize("threads", [0.0, 0.5, float("nan")])
def test_a_job_that_needs_no_thread_is_refused(threads):
    with pytest.raises(ValueError, match="threads must be a number of at least 1"):
        ReadingNeed(threads, 0.0)


# A disk that is busy 10 ms with a batch gives 100 batches/s; one thread alone reads 20.
DISK = {"disk_seconds": 0.010, "wait_seconds": 0.040}
LONG = 240.0


def hungry(name, device_seconds=0.005):
    return Job(name, **DISK, device_seconds=device_seconds)


def trained(*jobs, max_reader_threads, noise=0.0):
    host = Host(list(jobs), max_reader_threads, noise)
    host.run(LONG)
    return host


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_a_budget_is_kept_and_divided_by_need(noise):
    host = trained(hungry("fast"), hungry("slow", 0.020), max_reader_threads=10, noise=noise)
    _, parts = host.parts[-1]
    assert sum(parts.values()) == 10
    assert sum(job.loaders for job in host.jobs) <= 10
    assert parts["fast"] >= 2 * parts["slow"]
    fast, slow = (throughput(job, LONG / 2, LONG) for job in host.jobs)
    assert fast + slow >= 95.0
    assert fast >= 2 * slow


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.3])
def test_a_division_does_not_follow_noise(noise):
    host = trained(hungry("fast"), hungry("slow", 0.020), max_reader_threads=10, noise=noise)
    late = [parts for when, parts in host.parts if when > 30.0]
    changes = sum(before != after for before, after in itertools.pairwise(late))
    assert len(late) > 200
    assert changes <= 2


def test_a_budget_holds_for_a_job_alone():
    host = trained(hungry("a"), max_reader_threads=3)
    assert host.jobs[0].loaders <= 3
    assert throughput(host.jobs[0], LONG / 2, LONG) == pytest.approx(3 * 20.0, rel=0.05)


def test_a_job_that_computes_is_not_bounded_and_takes_no_thread():
    computing = Job("c", 0.0, 0.0, 0.002, cpu_seconds=0.009)
    host = trained(hungry("a"), hungry("b"), computing, max_reader_threads=4)
    assert host.parts[-1][1] == {"a": 2, "b": 2}
    assert computing.loaders > 4
