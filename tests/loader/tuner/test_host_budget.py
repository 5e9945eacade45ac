"""Jobs of a host divide its CPUs; the part of a job that is gone returns."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap

import psutil
import pytest

from keras_het.loader.host_budget import HostBudget
from keras_het.planning.loader import JobModel

HUNGRY = JobModel(0.040, 0.002, cpu_seconds=0.040)
SATISFIED = JobModel(0.001, 0.050, cpu_seconds=0.001)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "loaders.json"


def test_a_job_alone_has_the_host(path):
    assert HostBudget(8.0, path).update(HUNGRY) == 8.0


def test_two_equal_jobs_have_half_each(path):
    first, second = HostBudget(8.0, path), HostBudget(8.0, path)
    first.update(HUNGRY)
    assert second.update(HUNGRY) == pytest.approx(4.0)
    assert first.update(HUNGRY) == pytest.approx(4.0)
    assert first.jobs == 2


def test_a_job_that_needs_little_leaves_the_rest(path):
    first, second = HostBudget(8.0, path), HostBudget(8.0, path)
    second.update(SATISFIED)
    assert first.update(HUNGRY) > 6.0


def test_who_leaves_gives_back(path):
    first, second = HostBudget(8.0, path), HostBudget(8.0, path)
    second.update(HUNGRY)
    first.update(HUNGRY)
    second.leave()
    assert first.update(HUNGRY) == 8.0
    second.leave()


def test_a_killed_job_gives_back(path, tmp_path):
    program = tmp_path / "job.py"
    program.write_text(
        textwrap.dedent(
            f"""
            import pathlib, sys
            from keras_het.loader.host_budget import HostBudget
            from keras_het.planning.loader import JobModel
            budget = HostBudget(8.0, pathlib.Path({str(path)!r}))
            budget.update(JobModel(0.040, 0.002, cpu_seconds=0.040))
            print("written", flush=True)
            sys.stdin.read()
            """
        )
    )
    other = subprocess.Popen(
        [sys.executable, program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout.readline() == "written\n"
        budget = HostBudget(8.0, path)
        assert budget.update(HUNGRY) == pytest.approx(4.0)
        other.send_signal(signal.SIGKILL)
        other.wait(20)
        assert budget.update(HUNGRY) == 8.0
    finally:
        other.kill()
        other.communicate(timeout=20)


def test_another_process_with_the_same_number_is_not_that_job(path):
    first = HostBudget(8.0, path)
    first.update(HUNGRY)
    entries = json.loads(path.read_text())
    (entry,) = entries.values()
    assert entry["pid"] == os.getpid()
    entry["started"] = psutil.Process().create_time() - 1000.0
    path.write_text(json.dumps({"other": entry}))
    assert first.update(HUNGRY) == 8.0


def test_a_job_that_is_silent_does_not_count(path):
    first = HostBudget(8.0, path)
    first.update(HUNGRY)
    (entry,) = json.loads(path.read_text()).values()
    path.write_text(json.dumps({"other": {**entry, "written": entry["written"] - 3600.0}}))
    assert first.update(HUNGRY) == 8.0


@pytest.mark.parametrize("text", ["", "{", "[]", '{"x": 1}', '{"x": {"pid": "y"}}'])
def test_a_broken_file_is_begun_anew(path, text):
    path.write_text(text)
    assert HostBudget(4.0, path).update(HUNGRY) == 4.0


def test_the_file_of_each_user_is_private(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    HostBudget(4.0).update(HUNGRY)
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o077 == 0
    assert (folder / "loaders.json").exists()
