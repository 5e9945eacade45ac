"""A pipeline over several workers that is stopped, loses one of them, or goes on from a backup."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from forked_workers import Workers, cluster_environments
from recorded import assert_same_variables

PROGRAM = "program_stop.py"
# Devices of both stages: one is that of worker 0, the other that of worker 1.
PLAN, REVERSED, TOGETHER = "[[0], [1]]", "[[1], [0]]", "[[1], [1, 0]]"
TERMINATED = 128 + signal.SIGTERM
pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def expected(start_for_session: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one device ends with."""
    path = tmp_path_factory.mktemp("expected") / "one.npz"
    options = json.dumps({"epochs": 3, "result": str(path)})
    (worker,) = start_for_session(PROGRAM, arguments=[options]).wait()
    assert worker.exit_code == 0, worker.output
    return path


def start(start_workers: Any, plan: str = PLAN, **options: Any) -> Workers:
    return start_workers(  # type: ignore[no-any-return]
        PROGRAM,
        arguments=[json.dumps({"plan": plan, **options})],
        environments=cluster_environments({"worker": 2}),
    )


def assert_goes_on(
    start_workers: Any, plan: str, backup: Path, result: Path, expected: Path
) -> None:
    resumed = start(start_workers, plan, epochs=3, backup=str(backup), result=str(result))
    for worker in resumed.wait():
        assert worker.exit_code == 0, worker.output
    assert_same_variables(result, expected, steps=18)


@pytest.mark.parametrize("lost", [0, 1])
def test_the_other_worker_names_the_one_that_is_killed(start_workers: Any, lost: int) -> None:
    workers = start(start_workers)
    workers.wait_for_outputs(range(2), "training")
    workers.send_signal(lost, signal.SIGKILL)
    result = workers.wait_for(1 - lost)
    assert result.exit_code == 1, result.output
    assert f"WorkerLostError: Lost worker {lost} (127.0.0.1:" in result.output
    assert "errors_impl" not in result.output


@pytest.mark.parametrize("mode", ["fit", "evaluate", "predict"])
def test_a_signal_to_one_worker_ends_both(start_workers: Any, mode: str) -> None:
    workers = start(start_workers, mode=mode, signal_at=[None, 10])
    for result in workers.wait():
        assert result.exit_code == TERMINATED, result.output
        assert "WorkerLostError" not in result.output


@pytest.mark.parametrize("plan", [PLAN, REVERSED, TOGETHER])
def test_training_goes_on_after_a_signal_with_any_plan(
    start_workers: Any, tmp_path: Path, expected: Path, plan: str
) -> None:
    backup = tmp_path / "backup"
    # six steps an epoch: within the second, where no worker has all of the weights
    stopped = start(start_workers, epochs=3, backup=str(backup), signal_at=[None, 10])
    for result in stopped.wait():
        assert result.exit_code == TERMINATED, result.output
    assert backup.exists()
    assert_goes_on(start_workers, plan, backup, tmp_path / "result.npz", expected)


def test_training_goes_on_from_a_save_within_an_epoch(
    start_workers: Any, tmp_path: Path, expected: Path
) -> None:
    backup = tmp_path / "backup"
    options = {"epochs": 3, "backup": str(backup), "save_freq": 2}
    killed = start(start_workers, signal_at=[9, 9], signal=int(signal.SIGKILL), **options)
    killed.wait()
    assert backup.exists()
    assert_goes_on(start_workers, REVERSED, backup, tmp_path / "result.npz", expected)


def test_a_worker_that_saves_alone_within_an_epoch_is_told(start_workers: Any) -> None:
    workers = start(start_workers, saves_at=[8, None])
    for result in workers.wait():
        assert result.exit_code == 1, result.output
        assert "ValueError: The workers have each trained their own stages" in result.output
        assert "save_weights within an epoch on worker 0, but not on all workers" in result.output
