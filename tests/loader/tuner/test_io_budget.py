"""Jobs of a host divide the reading threads that a user gave them, through its file."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from keras_het.loader.host.budget import HostBudget
from keras_het.loader.host.jobs import Entry, entry_of
from keras_het.planning.loader import JobModel, ReadingNeed

JOB = JobModel(0.040, 0.002)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "loaders.json"


def job_on(path, io_budget=None):
    return HostBudget(8.0, path, range(8), io_budget, {})


def need(threads=16.0, seconds=15.0):
    return ReadingNeed(threads, time.time() + seconds)


def bounds(jobs, *needs):
    """What each job has once all are there."""
    for _ in range(2):
        for job, own in zip(jobs, needs, strict=True):
            job.update(JOB, own)
    return [job.reading_loaders for job in jobs]


def test_without_a_budget_nobody_is_bounded(path):
    assert bounds([job_on(path), job_on(path)], need(), need()) == [None, None]


def test_a_budget_is_divided_by_what_the_devices_need(path):
    assert bounds([job_on(path, 10), job_on(path)], need(80.0), need(20.0)) == [8, 2]


def test_a_division_follows_the_needs(path):
    jobs = [job_on(path, 10), job_on(path)]
    assert bounds(jobs, need(160.0), need(160.0)) == [5, 5]
    assert bounds(jobs, need(80.0), need(20.0)) == [8, 2]


def test_the_smallest_budget_counts(path):
    assert sum(bounds([job_on(path, 10), job_on(path, 6)], need(), need())) == 6


def test_a_budget_goes_with_who_gave_it(path):
    """A job that computes has given it, and ends."""
    reads, computes = job_on(path), job_on(path, 4)
    assert bounds([reads, computes], need(), None) == [4, None]
    computes.leave()
    assert bounds([reads], need()) == [None]


def test_a_job_that_computes_has_no_part_and_takes_none(path):
    assert bounds([job_on(path, 10), job_on(path, 10)], need(), None) == [10, None]


def test_who_leaves_gives_the_reading_threads_back(path):
    first, second = job_on(path, 10), job_on(path, 10)
    assert bounds([first, second], need(), need()) == [5, 5]
    second.leave()
    assert bounds([first], need()) == [10]


@pytest.mark.parametrize(("seconds", "counts"), [(15.0, True), (-45.0, False), (60.0, True)])
def test_a_job_that_does_not_read_for_a_while_has_no_part_meanwhile(seconds, counts, path):
    jobs = [job_on(path, 10), job_on(path, 10)]
    assert bounds(jobs, need(), need(seconds=seconds)) == ([5, 5] if counts else [10, None])


def test_a_budget_beyond_any_use_takes_no_time(path):
    start = time.monotonic()
    first, second = bounds([job_on(path, 10**12), job_on(path)], need(), need())
    assert first == second >= 1000
    assert time.monotonic() - start < 5.0


def test_an_entry_says_everything_in_json():
    entry = Entry(JOB, 8.0, frozenset({0, 1}), need(), 12)
    assert entry_of(json.loads(json.dumps(entry.to_dict())), Path("file")) == entry


@pytest.mark.parametrize("reading", [{"threads": 1}, [1], 5, {**vars(need()), "threads": 0}])
def test_needs_of_another_version_do_not_count(reading, path):
    values = Entry(JOB, 8.0, frozenset({0})).to_dict()
    assert entry_of(values, path) is not None
    assert entry_of({**values, "reading": reading}, path) is None
