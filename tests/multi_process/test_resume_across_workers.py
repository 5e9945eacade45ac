"""Workers that were interrupted in the middle of an epoch end where one device ends."""

from __future__ import annotations

import itertools
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from recorded import assert_same_variables

PROGRAM = "program_resume.py"


@pytest.fixture(scope="module")
def expected(start_for_session: Any, tmp_path_factory: Any) -> Path:
    """What one device ends with."""
    path: Path = tmp_path_factory.mktemp("expected") / "one.npz"
    (worker,) = start_for_session(PROGRAM, arguments=["", path, 0, 0]).wait()
    assert worker.exit_code == 0, worker.output
    return path


def test_an_interrupted_cluster_goes_on_at_the_right_sample(
    start_workers: Any, tmp_path: Path, expected: Path
) -> None:
    local, shared, result = (tmp_path / name for name in ("backup-{}", "backup-0", "result.npz"))
    # Six steps an epoch: the last backup is after step 8, the third batch of the second epoch.
    interrupted = start_workers(PROGRAM, {"worker": 2}, [local, result, 9, 0])
    for worker in interrupted.wait():
        assert worker.exit_code == 1
        assert "InterruptedError: the power went out" in worker.output
    assert shared.exists() and not (tmp_path / "backup-1").exists()
    # A folder of each worker's own has no backup but the chief's.
    refused = start_workers(PROGRAM, {"worker": 2}, [local, result, 0, 0])
    for index, worker in enumerate(refused.wait()):
        assert worker.exit_code == 1
        assert "The workers found different backups" in worker.output
        assert f"{tmp_path}/backup-{index} of this worker ({index})" in worker.output
    assert not result.exists()
    resumed = start_workers(PROGRAM, {"worker": 2}, [shared, result, 0, 0])
    for worker in resumed.wait():
        assert worker.exit_code == 0, worker.output
    assert_same_variables(result, expected)
    assert not shared.exists()


@pytest.mark.full
def test_a_backup_of_the_end_is_read_by_all_before_the_chief_deletes_it(
    start_workers: Any, tmp_path: Path, expected: Path
) -> None:
    backup, result = tmp_path / "backup", tmp_path / "result.npz"
    for worker in start_workers(PROGRAM, {"worker": 2}, [backup, result, 18, 0, "late", 6]).wait():
        assert worker.exit_code == -signal.SIGKILL
    for worker in start_workers(PROGRAM, {"worker": 2}, [backup, result, 0, 0, "late", 6]).wait():
        assert worker.exit_code == 0, worker.output
    assert_same_variables(result, expected)
    assert not backup.exists()


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_kill_at_every_file_operation_of_two_saves(
    start_workers: Any, tmp_path: Path, expected: Path
) -> None:
    killed_before = set()
    for number in itertools.count(1):
        backup, result = tmp_path / str(number), tmp_path / f"{number}.npz"
        (killed,) = start_workers(PROGRAM, arguments=[backup, result, 5, number]).wait()
        if killed.exit_code != -signal.SIGKILL:
            assert "the power went out" in killed.output
            break
        killed_before.add(killed.output.split("killed before ")[-1].strip())
        (resumed,) = start_workers(PROGRAM, arguments=[backup, result, 0, 0]).wait()
        assert resumed.exit_code == 0, resumed.output
        assert_same_variables(result, expected)
    assert {"os.mkdir", "os.rename", "os.remove", "fsync", "after save_weights"} <= killed_before


@pytest.mark.full
@pytest.mark.parametrize("is_local", [False, True], ids=["shared", "copied"])
def test_a_cluster_whose_chief_is_killed_within_a_save(
    start_workers: Any, tmp_path: Path, expected: Path, is_local: bool
) -> None:
    backup, result = tmp_path / "backup-0", tmp_path / "result.npz"
    killed = start_workers(PROGRAM, {"worker": 2}, [backup, result, 0, 30]).wait()
    assert killed[0].exit_code == -signal.SIGKILL
    assert "WorkerLostError" in killed[1].output
    if is_local:
        shutil.copytree(backup, tmp_path / "backup-1")
        backup = tmp_path / "backup-{}"
    for worker in start_workers(PROGRAM, {"worker": 2}, [backup, result, 0, 0]).wait():
        assert worker.exit_code == 0, worker.output
    assert_same_variables(result, expected)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kind", "save_freq", "step"),
    [
        ("arrays", "epoch", 7),
        ("arrays", 6, 13),
        ("arrays", 4, 11),
        ("PyDataset", "epoch", 13),
        ("PyDataset", 4, 6),
        ("unknown size", 6, 7),
        ("unknown size", 4, 9),
        ("unknown size", "epoch", 16),
    ],
)
def test_three_workers_that_are_killed(
    start_workers: Any, tmp_path: Path, kind: str, save_freq: str | int, step: int
) -> None:
    backup, one, result = (tmp_path / name for name in ("backup", "one.npz", "result.npz"))
    alone, killed, again = ([one, 0], [result, step], [result, 0])
    for cluster, folder, (file, at) in (
        (None, "", alone),
        ({"worker": 3}, backup, killed),
        ({"worker": 3}, backup, again),
    ):
        arguments = [folder, file, at, 0, kind, save_freq]
        for worker in start_workers(PROGRAM, cluster, arguments).wait():
            # One that is killed last may have noticed that the others are gone.
            assert (worker.exit_code != 0) == bool(at), worker.output
    assert_same_variables(result, one)
