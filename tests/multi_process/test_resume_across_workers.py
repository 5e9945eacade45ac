"""Workers that were interrupted in the middle of an epoch end where one device ends."""

from __future__ import annotations

import itertools
import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from moments import MOMENTS
from recorded import assert_same_variables

from keras_het.fit.backup_folder import RUN, remove_memory_folders

KILLED = int(signal.SIGKILL)


def train(start: Any, workers: int | None = None, **options: Any) -> Any:
    """Workers, or one process without a cluster, that train for three epochs of six steps."""
    options = {"epochs": 3, "save_freq": 2, "shares": [2, 1, 1], "remembers": True, **options}
    arguments = [json.dumps(options, default=str)]
    return start("program_stop.py", {"worker": workers} if workers else None, arguments).wait()


def train_well(start: Any, workers: int | None = None, **options: Any) -> None:
    for worker in train(start, workers, **options):
        assert worker.exit_code == 0, worker.output


@pytest.fixture(scope="module")
def expected(start_for_session: Any, tmp_path_factory: Any) -> Path:
    """What one device ends with."""
    path: Path = tmp_path_factory.mktemp("expected") / "one.npz"
    train_well(start_for_session, result=path)
    return path


@pytest.mark.full
def test_an_interrupted_cluster_continues_at_the_right_sample(
    start_workers: Any, tmp_path: Path, expected: Path
) -> None:
    local, shared, result = (tmp_path / name for name in ("backup-{}", "backup-0", "result.npz"))
    # The last backup is after step 8, the second batch of the second epoch.
    for worker in train(start_workers, 2, backup=local, result=result, fails_at=9):
        assert worker.exit_code == 1
        assert "InterruptedError: the power went out" in worker.output
    assert shared.exists() and not (tmp_path / "backup-1").exists()
    # A folder of each worker's own has no backup but the chief's.
    for index, worker in enumerate(train(start_workers, 2, backup=local, result=result)):
        assert worker.exit_code == 1
        assert "The workers found different backups" in worker.output
        assert f"Received: in {tmp_path}/backup-{index} backup " in worker.output
    assert not result.exists()
    train_well(start_workers, 2, backup=shared, result=result)
    assert_same_variables(result, expected)
    assert not shared.exists()


@pytest.mark.full
def test_a_backup_of_the_end_is_read_by_all_before_the_chief_deletes_it(
    start_workers: Any, tmp_path: Path, expected: Path
) -> None:
    backup, result = tmp_path / "backup", tmp_path / "result.npz"
    options = {"backup": backup, "result": result, "reads_late": True, "save_freq": 6}
    for worker in train(start_workers, 2, signal_at=18, signal=KILLED, **options):
        # One that is killed last may have noticed that the other is gone.
        assert worker.exit_code != 0, worker.output
    train_well(start_workers, 2, **options)
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
        options = {"backup": backup, "result": result}
        (killed,) = train(start_workers, fails_at=5, killed_before=number, **options)
        if killed.exit_code != -KILLED:
            assert "the power went out" in killed.output
            break
        killed_before.add(killed.output.split("killed before ")[-1].strip())
        train_well(start_workers, **options)
        assert_same_variables(result, expected)
    assert {"os.mkdir", "os.rename", "os.remove", "fsync", "after save_weights"} <= killed_before


@pytest.mark.full
@pytest.mark.parametrize("is_local", [False, True], ids=["shared", "copied"])
def test_a_cluster_whose_chief_is_killed_within_a_save(
    start_workers: Any, tmp_path: Path, expected: Path, is_local: bool
) -> None:
    backup, result = tmp_path / "backup-0", tmp_path / "result.npz"
    chief, other = train(start_workers, 2, backup=backup, result=result, killed_before=30)
    assert chief.exit_code == -KILLED
    assert "WorkerLostError" in other.output
    if is_local:
        shutil.copytree(backup, tmp_path / "backup-1")
        backup = tmp_path / "backup-{}"
    train_well(start_workers, 2, backup=backup, result=result)
    assert_same_variables(result, expected)


@pytest.mark.quick("2-arrays-4-11")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("number", "kind", "save_freq", "step"),
    [
        (2, "arrays", 4, 11),
        (3, "arrays", "epoch", 7),
        (3, "arrays", 6, 13),
        (3, "arrays", 4, 11),
        (3, "PyDataset", "epoch", 13),
        (3, "PyDataset", 4, 6),
        (3, "unknown size", 6, 7),
        (3, "unknown size", 4, 9),
        (3, "unknown size", "epoch", 16),
    ],
)
def test_workers_that_are_killed(
    start_workers: Any, tmp_path: Path, number: int, kind: str, save_freq: str | int, step: int
) -> None:
    backup, one, result = (tmp_path / name for name in ("backup", "one.npz", "result.npz"))
    options = {"input": kind, "save_freq": save_freq}
    killed = {"signal_at": step, "signal": KILLED}
    for worker in train(start_workers, number, backup=backup, result=result, **killed, **options):
        # One that is killed last may have noticed that the others are gone.
        assert worker.exit_code != 0, worker.output
    train_well(start_workers, number, backup=backup, result=result, **options)
    train_well(start_workers, result=one, **options)
    assert_same_variables(result, one)
    assert not backup.exists()


@pytest.mark.full
def test_a_machine_that_joins_with_a_newer_backup_of_another_run(
    start_workers: Any, tmp_path: Path, expected: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_chief, on_other = tmp_path / "backup-0", tmp_path / "backup-1"
    options = {"backup": tmp_path / "backup-{}", "result": tmp_path / "result.npz", "elastic": True}

    def trained_until(step: int, run: str) -> Path:
        monkeypatch.setenv(RUN, run)
        for worker in train(start_workers, 2, fails_at=step, **options):
            assert "InterruptedError: the power went out" in worker.output
        remove_memory_folders(run)
        (newest,) = on_chief.glob("backup-*")
        return newest

    runs = [f"test {tmp_path.name} {name}" for name in ("earlier", "present")]
    try:
        earlier = trained_until(12, runs[0])
        kept = earlier.read_bytes()
        earlier.unlink()
        present = trained_until(5, runs[1])
        assert int(present.name.split("-")[1]) < int(earlier.name.split("-")[1])
        on_other.mkdir()
        (of_another := on_other / earlier.name).write_bytes(kept)
        workers = train(start_workers, 2, **options)
        assert [worker.exit_code for worker in workers] == [0, 0], workers[1].output
        assert f"Ignored: {of_another}, which belongs to another" in workers[1].output
        assert of_another.read_bytes() == kept
        assert_same_variables(options["result"], expected)
    finally:
        for run in runs:
            remove_memory_folders(run)


def seen(start: Any, folder: Path, **options: Any) -> list[dict[str, str]]:
    """What each of two workers has seen, of all that callbacks remember."""
    arguments = [json.dumps({"folder": str(folder), **options})]
    workers = start("program_remembering.py", {"worker": 2}, arguments).wait()
    if "killed_at" in options:
        # One that is killed last may have noticed that the other is gone.
        assert all(worker.exit_code != 0 for worker in workers)
        assert any(worker.exit_code == -KILLED for worker in workers)
        return []
    assert [worker.exit_code for worker in workers] == [0, 0], workers[0].output
    texts = [(folder / str(index) / "seen.txt").read_text() for index in range(2)]
    return [dict(line.split(": ", 1) for line in text.splitlines()) for text in texts]


@pytest.fixture(scope="module")
def undisturbed(start_for_session: Any, tmp_path_factory: Any) -> list[dict[str, str]]:
    found = seen(start_for_session, tmp_path_factory.mktemp("undisturbed"))
    assert "best.weights.h5" in found[0]["files"] and "epoch_loss" in found[0]["scalars"]
    return found


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("moment", "save_freq", "is_killed_last"),
    zip(MOMENTS, itertools.cycle([1, 3, "epoch"]), itertools.cycle([True, False]), strict=False),
)
def test_callbacks_of_workers_that_are_killed_continue(
    start_workers: Any,
    tmp_path: Path,
    undisturbed: list[dict[str, str]],
    moment: str,
    save_freq: str | int,
    is_killed_last: bool,
) -> None:
    options = {"save_freq": save_freq, "is_backup_first": not is_killed_last}
    killed = {"killed_at": MOMENTS[moment], "is_killed_last": is_killed_last}
    seen(start_workers, tmp_path, **options, **killed)
    for found, expected in zip(seen(start_workers, tmp_path, **options), undisturbed, strict=True):
        for name in expected:
            assert found[name] == expected[name], name
