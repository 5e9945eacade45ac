"""Workers of different speed balance themselves, agree, and train as one device does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked_workers import cluster_environments

from keras_het.launch.local.worker_environment import Emulation

STEPS, PHASE, BATCH = 240, 80, 40

# recipes/test_readme.py is the quick one: shares by measured speeds, and the losses of one device.
pytestmark = pytest.mark.full


@pytest.fixture(scope="module", params=[False, True], ids=["", "asynchronous"])
def folder(start_for_session: Any, tmp_path_factory: Any, request: Any) -> Path:
    """Results of workers; those of asynchronous devices measure some of their steps only."""
    folder: Path = tmp_path_factory.mktemp("balance")
    emulation = Emulation((3, 1), seconds_per_sample=0.003, asynchronous=request.param)
    environments = [
        {**environment, **emulation.environment_of(index)}
        for index, environment in enumerate(cluster_environments({"worker": 2}))
    ]
    single = start_for_session("program_balance.py", arguments=[folder, 1])
    workers = start_for_session(
        "program_balance.py", arguments=[folder, 3], environments=environments
    )
    for worker in [*single.wait(), *workers.wait()]:
        assert worker.exit_code == 0, worker.output
    return folder


def report(folder: Path, worker: int) -> dict[str, Any]:
    return dict(json.loads((folder / f"worker_{worker}.json").read_text()))


def test_all_workers_measure_the_same_and_follow_the_chief(folder: Path) -> None:
    chief, other = report(folder, 0), report(folder, 1)
    assert chief["measurements"] == other["measurements"]
    shares = [[plan["shares"] for plan in each["plans"]] for each in (chief, other)]
    assert len(shares[0]) >= 4
    # the chief's last plans may have come too late to be followed
    assert shares[1] == shares[0][: len(shares[1])]
    assert len(shares[1]) >= len(shares[0]) - 1


def test_times_and_shares_of_every_step_are_known(
    folder: Path, request: pytest.FixtureRequest
) -> None:
    rows = report(folder, 0)["measurements"]
    numbers = [row["step"] for row in rows]
    if "asynchronous" in request.node.name:
        assert numbers[0] == 0 and numbers[-1] < STEPS and 20 < len(set(numbers)) < STEPS
        assert numbers == sorted(numbers)
        assert [report(folder, each)["read_in_plain_steps"] for each in range(2)] == [{}, {}]
    else:
        assert numbers == list(range(STEPS))
    assert all(sum(row["shares"]) == BATCH for row in rows)
    for row in rows:
        used = zip(row["shares"], row["seconds"], strict=True)
        assert all(seconds > 0 for share, seconds in used if share)


# Of 40 samples, speeds 3:1 give 30:10; replica 0 being three times slower gives 20:20.
@pytest.mark.parametrize(
    ("phase", "expected"), [(0, 30), (1, 20), (2, 30)], ids=["start", "slow-down", "recovery"]
)
def test_shares_follow_the_speeds(folder: Path, phase: int, expected: int) -> None:
    rows = report(folder, 0)["measurements"]
    of_phase = [row for row in rows if row["step"] // PHASE == phase]
    first_replica = [row["shares"][0] for row in of_phase]
    assert abs(first_replica[-1] - expected) <= 4, first_replica


def test_numbers_equal_one_device(folder: Path) -> None:
    with np.load(folder / "single.npz") as expected:
        for worker in range(2):
            with np.load(folder / f"worker_{worker}.npz") as actual:
                for name in expected:
                    np.testing.assert_allclose(actual[name], expected[name], rtol=1e-4, atol=5e-6)


def test_a_share_that_ran_out_of_memory_is_not_tried_again(
    start_workers: Any, tmp_path: Path
) -> None:
    arguments = [tmp_path / "memory", 1, 6, tmp_path / "shares.json"]
    first = start_workers("program_memory.py", {"worker": 2}, arguments)
    survivor, failed = first.wait()
    assert failed.exit_code == 1
    assert "Out of memory on replica(s) [1]" in failed.output
    assert "max_share={1: 5}" in failed.output  # half of 10, as nothing smaller was computed yet
    assert survivor.exit_code == 1
    assert "WorkerLostError" in survivor.output
    second = start_workers("program_memory.py", {"worker": 2}, arguments)
    for worker in second.wait():
        assert worker.exit_code == 0, worker.output
    shares = json.loads((tmp_path / "shares.json").read_text())
    assert len(shares) == 10
    assert all(share[1] <= 5 for share in shares), shares


@pytest.mark.parametrize("asynchronous", [False, True], ids=["", "asynchronous"])
@pytest.mark.parametrize("size", ["None", "auto"])
def test_the_chief_knows_what_fits_into_the_memory_of_others(
    start_workers: Any, tmp_path: Path, size: str, asynchronous: bool
) -> None:
    """At speeds 1:5 worker 1 deserves 33 of 40 samples, and holds 26."""
    emulation = Emulation((1, 5), seconds_per_sample=0.003, asynchronous=asynchronous)
    environments = [
        {**environment, **emulation.environment_of(index)}
        for index, environment in enumerate(cluster_environments({"worker": 2}))
    ]
    workers = start_workers(
        "program_counted_memory.py", arguments=[size, tmp_path], environments=environments
    )
    for worker in workers.wait():
        assert worker.exit_code == 0, worker.output
    chief, other = report(tmp_path, 0), report(tmp_path, 1)
    assert chief["shares"] == other["shares"]
    assert other["largest"] <= 26
    assert "memory: 26 on 1." in chief["summary"]
    assert chief["shares"][-1] == 26 if size == "None" else chief["shares"][-1] > 30
