"""Jobs of a host divide its CPUs; the part of a job that is gone returns."""

import functools
import json
import logging
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from keras_het.callbacks import LoaderTuner
from keras_het.loader.host import budget as host_budget
from keras_het.loader.host import files as host_files
from keras_het.loader.host.budget import CpuPart, HostBudget
from keras_het.planning.loader import JobModel, ReadingNeed

HUNGRY = JobModel(0.040, 0.002, cpu_seconds=0.040)
SATISFIED = JobModel(0.001, 0.050, cpu_seconds=0.001)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "loaders.json"


def job_on(path, cpus=range(8), usable=None, quotas=None, io_budget=None):
    """A job that may run on these CPUs, of the eight of an emulated host."""
    usable = min([len(cpus), *(quotas or {}).values()]) if usable is None else usable
    return HostBudget(float(usable), path, cpus, io_budget, quotas or {})


def need(threads=8.0, seconds=15.0):
    return ReadingNeed(threads, time.time() + seconds)


def parts(jobs, model=None):
    for job in jobs:
        job.update(model or HUNGRY)
    return [job.update(model or HUNGRY) for job in jobs]


def test_two_equal_jobs_have_half_each_until_one_leaves(path):
    first, second = job_on(path), job_on(path)
    first.update(HUNGRY)
    assert second.update(HUNGRY) == pytest.approx(4.0)
    assert first.update(HUNGRY) == pytest.approx(4.0)
    assert first.jobs == 2
    second.leave()
    assert first.update(HUNGRY) == 8.0
    second.leave()


WRITES = """
import pathlib, sys
from keras_het.loader.host.budget import HostBudget
from keras_het.planning.loader import JobModel
budget = HostBudget(8.0, pathlib.Path(sys.argv[1]), range(8), quotas={})
budget.update(JobModel(0.040, 0.002, cpu_seconds=0.040))
print("written", flush=True)
sys.stdin.read()
"""
HOLDS = """
import fcntl, os, signal, sys
lock = open(sys.argv[1], "a")
fcntl.flock(lock, fcntl.LOCK_EX)
print("locked", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""


def start(program, path):
    command = [sys.executable, "-c", program, str(path)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.full
def test_a_killed_job_gives_back(path):
    other = start(WRITES, path)
    try:
        assert other.stdout.readline() == "written\n"
        budget = job_on(path)
        assert budget.update(HUNGRY) == pytest.approx(4.0)
        assert budget.processes == {other.pid}
        other.send_signal(signal.SIGKILL)
        other.wait(20)
        assert budget.update(HUNGRY) == 8.0
        assert budget.processes == set()
    finally:
        other.kill()
        other.communicate(timeout=20)


@pytest.mark.parametrize("name", ["started", "written"])
def test_another_process_of_its_number_or_a_silent_one_does_not_count(name, path):
    first = job_on(path)
    first.update(HUNGRY)
    (entry,) = json.loads(path.read_text()).values()
    assert entry["pid"] == os.getpid()
    path.write_text(json.dumps({"other": {**entry, name: entry[name] - 3600.0}}))
    assert first.update(HUNGRY) == 8.0


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
def test_jobs_divide_the_cpus_for_which_they_compete(cpus, expected, numbers, path):
    jobs = [job_on(path, each) for each in cpus]
    assert parts(jobs) == pytest.approx(expected)
    assert [job.jobs for job in jobs] == numbers


QUOTAS = {
    "of one group": ([{"a": 4.0}, {"a": 4.0}], [2.0, 2.0]),
    "of a group each": ([{"a": 4.0}, {"b": 4.0}], [4.0, 4.0]),
    "more than there are CPUs": ([{group: 4.0} for group in "abcd"], [2.0] * 4),
    "two in one group": ([{"a": 4.0}, {"a": 4.0}, {"b": 4.0}], [2.0, 2.0, 4.0]),
    "one without": ([{"a": 2.0}, {}], [2.0, 6.0]),
    "of the group around": ([{"a": 4.0, "pod": 6.0}, {"b": 4.0, "pod": 6.0}], [3.0, 3.0]),
    "a tight one within": ([{"a": 1.0, "pod": 4.0}, {"b": 8.0, "pod": 4.0}, {}], [1.0, 3.0, 4.0]),
    "very small": ([{"a": 0.05}, {"a": 0.05}, {}], [0.025, 0.025, 7.95]),
    "just lowered": ([{"a": 2.0}, {"a": 4.0}], [2.0, 2.0]),
}


@pytest.mark.parametrize(("quotas", "expected"), QUOTAS.values(), ids=QUOTAS)
def test_a_quota_bounds_the_jobs_of_its_group(quotas, expected, path):
    jobs = [job_on(path, quotas=each) for each in quotas]
    assert parts(jobs) == pytest.approx(expected)


def test_by_default_the_groups_of_the_process_count(path, monkeypatch):
    monkeypatch.setattr(host_budget, "own_quotas", lambda: {"7:12": 0.5})
    HostBudget(path=path).update(HUNGRY)
    (entry,) = json.loads(path.read_text()).values()
    assert entry["quotas"] == {"7:12": 0.5}


UNREADABLE = {
    "a field more": lambda entry: entry["job"].update(patience=1.0),
    "a field less": lambda entry: entry["job"].pop("loader_seconds"),
    "no CPUs": lambda entry: entry.pop("cpu_set"),
    "a wrong CPU": lambda entry: entry.update(cpu_set=[-1]),
    "infinitely many CPUs": lambda entry: entry.update(cpus=math.inf),
    "no model": lambda entry: entry.pop("job"),
    "another model": lambda entry: entry.update(job=[1, 2]),
    "no number": lambda entry: entry["job"].update(device_seconds=None),
    "below zero": lambda entry: entry["job"].update(device_seconds=-1.0),
    "quotas of another form": lambda entry: entry.update(quotas=[4.0]),
    "a quota of nothing": lambda entry: entry.update(quotas={"a": 0.0}),
    "a wrong budget": lambda entry: entry.update(io_budget=-5),
    "half a need": lambda entry: entry["reading"].pop("until"),
    "a list of needs": lambda entry: entry.update(reading=[1]),
    "a number of needs": lambda entry: entry.update(reading=5),
    "no need": lambda entry: entry["reading"].update(threads=0),
}


@pytest.mark.parametrize("change", UNREADABLE.values(), ids=UNREADABLE)
def test_an_entry_of_another_version_does_not_count_and_stays(change, path, caplog):
    first, second = job_on(path, io_budget=4), job_on(path)
    first.update(HUNGRY, need())
    ((name, entry),) = json.loads(path.read_text()).items()
    change(entry)
    path.write_text(json.dumps({name: entry}))
    for _ in range(2):
        assert second.update(HUNGRY, need()) == 8.0
        assert second.reading_loaders is None
    (record,) = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert str(path) in record.getMessage() and "cannot be read" in record.getMessage()
    assert json.loads(path.read_text())[name] == entry


@pytest.mark.parametrize("values", [{"pid": "y"}, {"pid": math.inf}, {"pid": -5}, 1], ids=str)
def test_what_tells_no_process_goes_alone(values, path):
    first, second = job_on(path), job_on(path)
    first.update(HUNGRY)
    ((name, entry),) = json.loads(path.read_text()).items()
    values = {**entry, **values} if isinstance(values, dict) else values
    path.write_text(json.dumps({name: entry, "x": values}))
    assert second.update(HUNGRY) == pytest.approx(4.0)
    assert "x" not in json.loads(path.read_text())


def test_a_process_that_is_stopped_with_the_lock_holds_nobody_up(path):
    first, second = job_on(path), job_on(path)
    assert parts([first, second]) == pytest.approx([4.0, 4.0])
    holder = start(HOLDS, path.with_suffix(".lock"))
    try:
        assert holder.stdout.readline() == "locked\n"
        assert first.update(SATISFIED) == pytest.approx(4.0), "what was known before"
        assert job_on(path).update(HUNGRY) == 8.0, "nothing was known before"
        second.leave()
        holder.send_signal(signal.SIGCONT)
        holder.wait(20)
        assert first.update(SATISFIED) != pytest.approx(4.0)
    finally:
        holder.kill()
        holder.communicate(timeout=20)


def test_a_process_that_was_forked_meanwhile_does_not_keep_the_lock(path, monkeypatch):
    acquire, inherited = host_files.FileLock.acquire, []

    def and_fork(lock, *arguments, **options):
        acquire(lock, *arguments, **options)
        (file,) = {file for file in open_files() if file.endswith(".lock")}
        inherited.append(os.dup(int(open_files()[file])))  # what a child has of it

    def open_files():
        numbers = Path("/proc/self/fd").iterdir()
        return {os.path.realpath(number): number.name for number in numbers}

    with monkeypatch.context() as patch:
        patch.setattr(host_files.FileLock, "acquire", and_fork)
        first = job_on(path)
        first.update(HUNGRY)
    other = job_on(path)
    other.update(HUNGRY)
    assert other.jobs == 2
    for file in inherited:
        os.close(file)


@pytest.mark.parametrize("error", [RuntimeError("no btime"), psutil.AccessDenied(1)])
def test_a_system_that_hides_processes_is_an_error_of_the_system(error, path, monkeypatch):
    def hides(process):
        raise error

    monkeypatch.setattr(psutil.Process, "create_time", hides)
    with pytest.raises(OSError, match="does not tell when process"):
        job_on(path).update(HUNGRY)


def test_the_file_of_each_user_is_private(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    HostBudget(4.0, quotas={}).update(HUNGRY)
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o077 == 0
    assert (folder / "loaders.json").exists()


def far_nested(depth=100_000):
    return "[" * depth + "]" * depth


BROKEN = {
    "nested": far_nested(),
    "nested entries": '{"x": ' + far_nested() + "}",
    "huge": " " * (host_files.LARGEST_BYTES + 1),
    "a number of many digits": '{"x": {"pid": ' + "9" * 5000 + "}}",
    "no text": b"\xff\xfe",
    "infinite": "Infinity",
    "empty": "",
    "a list": "[1]",
    "half": "{",
    "a number": '{"x": 1}',
    "no process": '{"x": {"pid": "y"}}',
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_a_file_of_another_form_is_ignored_with_one_warning(path, caplog, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    job = job_on(path)
    assert [job.update(HUNGRY, need()) for _ in range(2)] == [8.0, 8.0]
    (record,) = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert str(path) in record.getMessage()
    assert json.loads(path.read_text())


WILD = [math.inf, -math.inf, math.nan, -1, -1e300, 1e300, 10**400, 2**63, True]
WILD += ["x", None, [], {}, [[1]]]


@pytest.mark.full
def test_no_value_of_another_job_ends_a_training(path, caplog):
    """Each number and each part of the file is replaced by each wild value in turn."""
    jobs, tried = [job_on(path, io_budget=8), job_on(path)], 0
    for _ in range(2):
        parts_now = [job.update(HUNGRY, need()) for job in jobs]
    assert [job.reading_loaders for job in jobs] == [4, 4]
    good = path.read_text()
    for place in places_of(json.loads(good)):
        for value in WILD:
            values = json.loads(good)
            *way, last = place
            functools.reduce(lambda inner, key: inner[key], way, values)[last] = value
            path.write_text(json.dumps(values))
            host_files._warned.clear()
            caplog.clear()
            for job in jobs:
                assert 0 < job.update(HUNGRY, need()) <= 8.0
                assert job.reading_loaders is None or job.reading_loaders >= 1
            assert len([each for each in caplog.records if each.levelno >= logging.WARNING]) <= 1
            tried += 1
    assert tried > 100 and min(parts_now) > 0


def places_of(values, way=()):
    pairs = values.items() if isinstance(values, dict) else enumerate(values)
    for key, value in pairs:
        yield (*way, key)
        if isinstance(value, (dict, list)):
            yield from places_of(value, (*way, key))


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


@pytest.mark.parametrize(
    ("kind", "suffix"),
    [
        *(("a link", each) for each in (".json", ".lock", ".json.new")),
        *(("a pipe", each) for each in (".json", ".json.new")),
    ],
)
def test_what_is_in_the_place_of_a_file_is_not_followed(kind, suffix, path, tmp_path, caplog):
    victim, place = tmp_path / "victim", path.with_suffix(suffix)
    victim.write_text("mine")
    if kind == "a link":
        place.symlink_to(victim)
    else:
        os.mkfifo(place)
    share = CpuPart(job_on(path))
    share.update(HUNGRY)
    share.update(HUNGRY)
    assert victim.read_text() == "mine"
    warned = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert len(warned) == (not suffix.endswith(".new"))


def test_an_entry_whose_process_tells_nothing_does_not_count(path, monkeypatch):
    """Read before one's own: of a job outside of a container that hides when processes started."""
    job_on(path).update(HUNGRY)

    def hides(process):
        raise RuntimeError("no btime")

    monkeypatch.setattr(psutil.Process, "create_time", hides)
    job_on(path).leave()
    assert json.loads(path.read_text()) == {}


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
def test_reading_threads_are_divided_among_those_that_read(budgets, needs, expected, path):
    jobs = [job_on(path, io_budget=each) for each in budgets]
    assert bounds(jobs, *(each if each is None else need(**each) for each in needs)) == expected


def test_a_budget_is_divided_by_what_the_devices_need_and_returns(path):
    first, second = job_on(path, io_budget=10), job_on(path)
    assert bounds([first, second], need(160.0), need(160.0)) == [5, 5]
    assert bounds([first, second], need(80.0), need(20.0)) == [8, 2]
    second.leave()
    assert bounds([first], need()) == [10]


def test_a_budget_goes_with_who_gave_it(path):
    """A job that computes has given it, and ends."""
    reads, computes = job_on(path), job_on(path, io_budget=4)
    assert bounds([reads, computes], need(), None) == [4, None]
    computes.leave()
    assert bounds([reads], need()) == [None]


def test_a_budget_beyond_any_use_takes_no_time(path):
    start = time.monotonic()
    first, second = bounds([job_on(path, io_budget=10**12), job_on(path)], need(), need())
    assert first == second >= 1000
    assert time.monotonic() - start < 5.0
