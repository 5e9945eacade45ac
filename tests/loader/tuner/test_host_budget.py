"""Jobs of a host divide its CPUs; the part of a job that is gone returns."""

import json
import logging
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from keras_het.callbacks import LoaderTuner
from keras_het.loader import host_budget
from keras_het.loader.host_budget import CpuPart, HostBudget, Quota
from keras_het.planning.loader import JobModel, ReadingNeed

HUNGRY = JobModel(0.040, 0.002, cpu_seconds=0.040)
SATISFIED = JobModel(0.001, 0.050, cpu_seconds=0.001)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "jobs"


def job_on(folder, cpus=range(8), quota=None, max_reader_threads=None):
    """A job that may run on these CPUs, of the eight of an emulated host."""
    usable = len(cpus) if quota is None else min(len(cpus), quota[1])
    quota = None if quota is None else Quota(*quota)
    return HostBudget(float(usable), folder, cpus, max_reader_threads, quota)


def file_of(job):
    return job._path


def read(job):
    return json.loads(file_of(job).read_text())


def replace(job, values):
    file_of(job).write_text(json.dumps(values))


def warnings(caplog):
    return [each for each in caplog.records if each.levelno >= logging.WARNING]


def need(threads=8.0, seconds=15.0):
    return ReadingNeed(threads, time.time() + seconds)


def parts(jobs, model=None):
    for job in jobs:
        job.update(model or HUNGRY)
    return [job.update(model or HUNGRY) for job in jobs]


def test_two_equal_jobs_have_half_each_until_one_leaves(folder):
    first, second = job_on(folder), job_on(folder)
    first.update(HUNGRY)
    assert second.update(HUNGRY) == pytest.approx(4.0)
    assert first.update(HUNGRY) == pytest.approx(4.0)
    assert first.jobs == 2
    second.leave()
    assert first.update(HUNGRY) == 8.0
    second.leave()


WRITES = """
import pathlib, sys
from keras_het.loader.host_budget import HostBudget
from keras_het.planning.loader import JobModel
budget = HostBudget(8.0, pathlib.Path(sys.argv[1]), range(8))
budget.update(JobModel(0.040, 0.002, cpu_seconds=0.040))
print("written", flush=True)
sys.stdin.read()
"""


def start(program, folder):
    command = [sys.executable, "-c", program, str(folder)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.full
def test_a_killed_job_gives_back(folder):
    other = start(WRITES, folder)
    try:
        assert other.stdout.readline() == "written\n"
        budget = job_on(folder)
        assert budget.update(HUNGRY) == pytest.approx(4.0)
        assert budget.processes == {other.pid}
        other.send_signal(signal.SIGKILL)
        other.wait(20)
        assert budget.update(HUNGRY) == 8.0
        assert budget.processes == set()
    finally:
        other.kill()
        other.communicate(timeout=20)


@pytest.mark.parametrize("change", ["another process", "silent"])
def test_another_process_of_its_number_or_a_silent_one_does_not_count(change, folder):
    first, second = job_on(folder), job_on(folder)
    first.update(HUNGRY)
    assert second.update(HUNGRY) == pytest.approx(4.0)
    if change == "silent":
        before = time.time() - host_budget.LONGEST_SILENCE_SECONDS - 1.0
        os.utime(file_of(first), (before, before))
    else:
        entry = read(first)
        assert entry["process"]["pid"] == os.getpid()
        entry["process"]["started"] -= 3600.0
        replace(first, entry)
    assert second.update(HUNGRY) == 8.0
    assert not file_of(first).exists()
    assert first.update(HUNGRY) == pytest.approx(4.0), "it is back"


CPUS = {
    "of their own": ([range(4), range(4, 8)], [4.0, 4.0], [1, 1]),
    "the same": ([range(4), range(4), range(4, 8)], [2.0, 2.0, 4.0], [2, 2, 1]),
    "through a third": (
        [range(3), range(2, 5), range(4, 6), range(6, 8)],
        [2.0, 2.0, 2.0, 2.0],
        [3, 3, 3, 1],
    ),
    "in part": ([range(6), range(2, 8)], [4.0, 4.0], [2, 2]),
    "one within all": ([range(8), [7]], [7.0, 1.0], [2, 2]),
}


@pytest.mark.parametrize(("cpus", "expected", "numbers"), CPUS.values(), ids=CPUS)
def test_jobs_divide_the_cpus_for_which_they_compete(cpus, expected, numbers, folder):
    jobs = [job_on(folder, each) for each in cpus]
    assert parts(jobs) == pytest.approx(expected)
    assert [job.jobs for job in jobs] == numbers


QUOTAS = {
    "of one group": ([("a", 4.0), ("a", 4.0)], [2.0, 2.0]),
    "of a group each": ([("a", 4.0), ("b", 4.0)], [4.0, 4.0]),
    "more than there are CPUs": ([(group, 4.0) for group in "abcd"], [2.0] * 4),
    "two in one group": ([("a", 4.0), ("a", 4.0), ("b", 4.0)], [2.0, 2.0, 4.0]),
    "one without": ([("a", 2.0), None], [2.0, 6.0]),
    "a tight one": ([("a", 2.0), None, None], [2.0, 3.0, 3.0]),
    "very small": ([("a", 0.05), ("a", 0.05), None], [0.025, 0.025, 7.95]),
    "just lowered": ([("a", 2.0), ("a", 4.0)], [2.0, 2.0]),
}


@pytest.mark.parametrize(("quotas", "expected"), QUOTAS.values(), ids=QUOTAS)
def test_a_quota_bounds_the_jobs_of_its_group(quotas, expected, folder):
    jobs = [job_on(folder, quota=each) for each in quotas]
    assert parts(jobs) == pytest.approx(expected)


def test_by_default_the_tightest_group_of_the_process_counts(folder, monkeypatch):
    quotas = {"own": 0.5, "around": 0.5, "outermost": 6.0}
    monkeypatch.setattr(host_budget, "own_quotas", lambda: quotas)
    job = HostBudget(folder=folder)
    job.update(HUNGRY)
    assert read(job)["quota"] == {"group": "around", "cpus": 0.5}


UNREADABLE = {
    "a field more": lambda entry: entry["job"].update(patience=1.0),
    "a field less": lambda entry: entry["job"].pop("loader_seconds"),
    "no CPUs": lambda entry: entry.pop("cpu_set"),
    "another model": lambda entry: entry.update(job=[1, 2]),
    "a quota of another form": lambda entry: entry.update(quota=[4.0]),
    "half a need": lambda entry: entry["reading"].pop("until"),
    "another process": lambda entry: entry.update(process=1),
}


@pytest.mark.parametrize("change", UNREADABLE.values(), ids=UNREADABLE)
def test_a_file_of_another_version_does_not_count_and_stays(change, folder, caplog):
    first, second = job_on(folder, max_reader_threads=4), job_on(folder)
    first.update(HUNGRY, need())
    entry = read(first)
    change(entry)
    replace(first, entry)
    for _ in range(2):
        assert second.update(HUNGRY, need()) == 8.0
        assert second.reading_loaders is None
    (record,) = warnings(caplog)
    assert str(file_of(first)) in record.getMessage() and "cannot be read" in record.getMessage()
    assert read(first) == entry
    assert first.update(HUNGRY) == pytest.approx(4.0), "and is replaced by its own job"


@pytest.mark.parametrize("error", [RuntimeError("no btime"), psutil.AccessDenied(1)])
def test_a_system_that_hides_processes_is_an_error_of_the_system(error, folder, monkeypatch):
    def hides(process):
        raise error

    monkeypatch.setattr(psutil.Process, "create_time", hides)
    with pytest.raises(OSError, match="does not tell when process"):
        job_on(folder).update(HUNGRY)


def test_the_files_of_each_user_are_private(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    job = HostBudget(4.0)
    job.update(HUNGRY)
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o077 == 0
    assert list((folder / "jobs").iterdir()) == [file_of(job)]
    job.leave()
    assert not list((folder / "jobs").iterdir())


BROKEN = {"no text": b"\xff\xfe", "empty": b"", "a list": b"[1]", "half": b"{"}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_a_file_of_another_form_is_ignored_with_one_warning(folder, caplog, text):
    folder.mkdir()
    broken = folder / "broken.json"
    broken.write_bytes(text)
    job = job_on(folder)
    assert [job.update(HUNGRY, need()) for _ in range(2)] == [8.0, 8.0]
    (record,) = warnings(caplog)
    assert str(broken) in record.getMessage()


def something_else(kind, place, elsewhere):
    elsewhere.mkdir()
    if kind == "a link":
        place.symlink_to(elsewhere, target_is_directory=True)
    elif kind == "a file":
        place.write_text("mine")
    else:
        place.mkdir()
        place.chmod(0o777)


@pytest.mark.parametrize("kind", ["a link", "a file", "a folder for all"])
def test_what_is_in_the_place_of_the_folder_is_left_alone(kind, tmp_path, monkeypatch, caplog):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    place, elsewhere = temporary / f"keras_het-{os.getuid()}", tmp_path / "elsewhere"
    something_else(kind, place, elsewhere)
    before = place.lstat()
    assert LoaderTuner()._make_budget() is None
    (record,) = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert str(place) in record.getMessage()
    assert not list(elsewhere.iterdir()) and place.lstat().st_mode == before.st_mode
    assert kind == "a file" or not list(place.iterdir())


def test_a_folder_that_cannot_be_written_ends_the_sharing_with_one_warning(folder, caplog):
    folder.write_text("a file in its place")
    share = CpuPart(job_on(folder))
    assert [share.update(HUNGRY), share.update(HUNGRY)] == [None, None]
    (record,) = warnings(caplog)
    assert "Jobs on this host do not share it" in record.getMessage()


# --- reading threads


def bounds(jobs, *needs):
    for _ in range(2):
        for job, own in zip(jobs, needs, strict=True):
            job.update(HUNGRY, own)
    return [job.reading_loaders for job in jobs]


PARTS = {
    "nobody gave a budget": ([None, None], [{}, {}], [None, None]),
    "the smallest counts": ([10, 6], [{}, {}], [3, 3]),
    "one computes": ([10, 10], [{}, None], [10, None]),
    "one will read on": ([10, 10], [{}, {"seconds": 60.0}], [5, 5]),
    "one did not read for a while": ([10, 10], [{}, {"seconds": -45.0}], [10, None]),
}


@pytest.mark.parametrize(("budgets", "needs", "expected"), PARTS.values(), ids=PARTS)
def test_reading_threads_are_divided_among_those_that_read(budgets, needs, expected, folder):
    jobs = [job_on(folder, max_reader_threads=each) for each in budgets]
    assert bounds(jobs, *(each if each is None else need(**each) for each in needs)) == expected


def test_a_budget_is_divided_by_what_the_devices_need_and_returns(folder):
    first, second = job_on(folder, max_reader_threads=10), job_on(folder)
    assert bounds([first, second], need(160.0), need(160.0)) == [5, 5]
    assert bounds([first, second], need(80.0), need(20.0)) == [8, 2]
    second.leave()
    assert bounds([first], need()) == [10]


def test_a_budget_goes_with_who_gave_it(folder):
    """A job that computes has given it, and ends."""
    reads, computes = job_on(folder), job_on(folder, max_reader_threads=4)
    assert bounds([reads, computes], need(), None) == [4, None]
    computes.leave()
    assert bounds([reads], need()) == [None]


def test_a_budget_beyond_any_use_takes_no_time(folder):
    start = time.monotonic()
    first, second = bounds(
        [job_on(folder, max_reader_threads=10**12), job_on(folder)], need(), need()
    )
    assert first == second >= 1000
    assert time.monotonic() - start < 5.0
