"""Jobs of a host divide what they read at once, through its file."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from keras_het.loader.host_budget import HostBudget
from keras_het.loader.host_jobs import Entry, entry_of
from keras_het.loader.host_reading import divide_reading
from keras_het.planning.loader import JobModel, Reading

JOB = JobModel(0.040, 0.002)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "loaders.json"


def job_on(path, io_budget=None):
    return HostBudget(8.0, path, range(8), io_budget)


def read(loaders=8, idle=0.5, age=0.0, window=1.0, number=0):
    ended = time.time() - age
    return Reading(loaders, 50, window, idle, ended - window, ended, number)


def bounds(jobs, *readings):
    """What each job has once all are there."""
    for _ in range(2):
        for job, reading in zip(jobs, readings, strict=True):
            job.update(JOB, reading)
    return [job.reading_loaders for job in jobs]


def test_without_a_budget_nobody_is_bounded_before_fewer_were_tried(path):
    assert bounds([job_on(path), job_on(path)], read(), read()) == [None, None]


def test_a_budget_is_divided_by_what_the_devices_need(path):
    jobs = [job_on(path, 10), job_on(path)]
    assert bounds(jobs, read(8, idle=0.9), read(8, idle=0.6)) == [8, 2]
    assert jobs[0].division == jobs[1].division > 0


def test_the_smallest_budget_counts(path):
    assert sum(bounds([job_on(path, 10), job_on(path, 6)], read(), read())) == 6


def test_a_job_that_computes_has_no_part_and_takes_none(path):
    assert bounds([job_on(path, 10), job_on(path, 10)], read(), None) == [10, None]


def test_who_leaves_gives_the_reading_threads_back(path):
    first, second = job_on(path, 10), job_on(path, 10)
    assert bounds([first, second], read(), read()) == [5, 5]
    second.leave()
    first.update(JOB, read())
    assert first.reading_loaders == 10


@pytest.mark.parametrize(
    ("age", "window", "counts"), [(0.0, 1.0, True), (60.0, 1.0, False), (60.0, 30.0, True)]
)
def test_a_job_that_does_not_read_for_a_while_has_no_part_meanwhile(age, window, counts, path):
    jobs = [job_on(path, 10), job_on(path, 10)]
    assert (bounds(jobs, read(), read(age=age, window=window))[0] == 5) == counts


def test_what_was_learned_survives_the_process(path):
    """A reading for each second of two jobs: fewer threads are tried, whoever asks."""
    state = path.with_suffix(".reading")
    start, number = 1000.0, 0
    for second in range(8):
        readings = {
            name: Reading(40, 50, 1.0, 0.75, start + second, start + second + 1.0, number)
            for name in "ab"
        }
        jobs = {
            name: Entry(JOB, 8.0, frozenset({0}), reading) for name, reading in readings.items()
        }
        for name in jobs:
            ceiling = divide_reading(state, name, jobs, start + second + 1.0)
            number = ceiling.number
        if ceiling.parts:
            break
    assert ceiling.parts == {"a": 20, "b": 20}
    assert json.loads(state.read_text())["threads"] == 40


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"number": "x"}'])
def test_a_broken_file_of_what_was_learned_is_begun_again(text, path):
    path.with_suffix(".reading").write_text(text)
    assert bounds([job_on(path, 10), job_on(path)], read(), read()) == [5, 5]


def test_an_entry_says_everything_in_json():
    entry = Entry(JOB, 8.0, frozenset({0, 1}), read(), 12)
    assert entry_of(json.loads(json.dumps(entry.to_dict())), Path("file")) == entry


@pytest.mark.parametrize("reading", [{"loaders": 1}, [1], 5, {**vars(read()), "loaders": 0}])
def test_readings_of_another_version_do_not_count(reading, path):
    values = Entry(JOB, 8.0, frozenset({0})).to_dict()
    assert entry_of(values, path) is not None
    assert entry_of({**values, "reading": reading}, path) is None


def tell_all(path, now, number, loaders=40, rate=50.0, idle=0.75, ages=(0.0, 0.0), step=None):
    """Both of two jobs have had a window of 6 s, so long ago."""
    for name in "ab":
        entries = {}
        for other, age in zip("ab", ages, strict=True):
            steps = int(6 * rate) if step is None else int(6 / step)
            end = now - age
            window = Reading(loaders, steps, 6.0, idle, end - 6.0, end, number)
            entries[other] = Entry(JOB, 1, frozenset({0}), window)
        ceiling = divide_reading(path, name, entries, now)
    return ceiling


def test_a_clock_that_goes_back_ends_what_is_tried(tmp_path):
    path = tmp_path / "reading"
    ceiling = tell_all(path, 10_000.0, 0)
    ceiling = tell_all(path, 10_010.0, ceiling.number)
    assert ceiling.parts == {"a": 20, "b": 20}
    later = tell_all(path, 6_400.0, ceiling.number, 20, 25.0, 0.9)
    assert (later.parts, later._trial) == ({}, None)
    assert later.number > ceiling.number


@pytest.mark.parametrize(("step", "reads"), [(0.5, True), (0.05, False)])
def test_a_job_that_moves_still_reads(tmp_path, step, reads):
    """Of 24 loaders it uses up to 48 batches of before, and has no window meanwhile."""
    path = tmp_path / "reading"
    first = tell_all(path, 1000.0, 0, loaders=24, step=step)
    later = tell_all(path, 1040.0, first.number, loaders=24, ages=(40.0, 0.0), step=step)
    assert (later.number == first.number) == reads
