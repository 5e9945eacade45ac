"""SIGTERM and Ctrl-C end all workers after the same step, and a second signal ends one at once."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forked_workers import Workers
from hybrid_clusters import environments
from recorded import assert_same_variables

TERMINATED = 128 + signal.SIGTERM
# Devices of both stages of a pipeline: one is that of worker 0, the other that of worker 1.
PLAN, REVERSED, TOGETHER = "[[0], [1]]", "[[1], [0]]", "[[1], [1, 0]]"


@pytest.fixture
def start(start_workers: Any) -> Callable[..., Workers]:
    def run(jobs: dict[str, int], **options: Any) -> Workers:
        return start_workers(  # type: ignore[no-any-return]
            "program_stop.py",
            arguments=[json.dumps(options)],
            environments=environments(jobs),
        )

    return run


def assert_all_end(workers: Workers, code: int = TERMINATED) -> None:
    for result in workers.wait():
        assert result.exit_code == code, result.output
        assert "WorkerLostError" not in result.output


REPEATED = {"validate": True, "remembers": True}
# What workers do, and what those do that continue from their backup.
RESUMED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "in-training": ({}, {}),
    "in-validation": (REPEATED, REPEATED),
    "read-late": ({"lag": 3, "validate": True}, {"lag": 3, "validate": True}),
    "pipeline": ({"plan": PLAN}, {"plan": PLAN}),
    "reversed-pipeline": ({"plan": PLAN}, {"plan": REVERSED}),
    "pipeline-of-replicas": ({"plan": PLAN}, {"plan": TOGETHER}),
    "killed-pipeline": (
        {"plan": PLAN, "save_freq": 2, "signal_at": 9, "signal": int(signal.SIGKILL)},
        {"plan": REVERSED},
    ),
}


@pytest.mark.full
@pytest.mark.parametrize(("before", "after"), RESUMED.values(), ids=RESUMED)
def test_training_continues_from_the_backup_at_the_right_sample(
    start: Any, start_workers: Any, tmp_path: Path, before: dict[str, Any], after: dict[str, Any]
) -> None:
    backup, result, expected = (tmp_path / name for name in ("backup", "result.npz", "one.npz"))
    common = {"epochs": 3, "backup": str(backup)}
    compared = {name: after.get(name, False) for name in ("validate", "remembers")}
    alone = {"epochs": 3, **compared, "result": str(expected)}
    single = start_workers("program_stop.py", arguments=[json.dumps(alone)])
    # six steps an epoch: within the second one, or in its validation
    stopped = start({"worker": 2}, **{"signal_at": [None, 10], **common, **before})
    if "signal" in before:
        stopped.wait()
    else:
        assert_all_end(stopped)
        assert "Another worker has received SIGTERM" in stopped.output(0)
    assert backup.exists()
    resumed = start({"worker": 2}, result=str(result), **common, **after)
    for worker in [*resumed.wait(), *single.wait()]:
        assert worker.exit_code == 0, worker.output
    assert_same_variables(result, expected, steps=18)


@pytest.mark.full
@pytest.mark.parametrize("lost", [0, 1])
def test_the_other_worker_of_a_pipeline_names_the_one_that_is_killed(start: Any, lost: int) -> None:
    workers = start({"worker": 2}, plan=PLAN)
    workers.wait_for_outputs(range(2), "training")
    workers.send_signal(lost, signal.SIGKILL)
    result = workers.wait_for(1 - lost)
    assert result.exit_code == 1, result.output
    assert f"WorkerLostError: Lost worker {lost} (127.0.0.1:" in result.output
    assert "errors_impl" not in result.output


@pytest.mark.full
def test_a_pipeline_worker_that_saves_alone_within_an_epoch_is_reported(start: Any) -> None:
    workers = start({"worker": 2}, plan=PLAN, saves_at=[8, None])
    for result in workers.wait():
        assert result.exit_code == 1, result.output
        assert "ValueError: The workers have each trained their own stages" in result.output
        assert "save_weights within an epoch on worker 0, but not on all workers" in result.output


WAITS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "all-for-data": (2, 4, {"waits_at": 36}),
    "chief-for-another-worker": (2, 4, {"waits_at": [None, 36]}),
    "callback": (2, 4, {"waits_at": None, "stuck_at": 4, "backup_last": True}),
    "end-of-epoch": (2, 6, {"waits_at": None, "remembers": True, "stuck_after": [0, None]}),
    "validation": (2, 2, {"waits_at": 20, "validate": True, "remembers": True, "epochs": 1}),
    "alone": (1, 4, {"waits_at": 36}),
}


@pytest.mark.quick("alone")
@pytest.mark.parametrize(("number", "step", "waits"), WAITS.values(), ids=WAITS)
def test_what_waits_ends_in_time_and_continues_from_the_newest_backup(
    start: Any, tmp_path: Path, number: int, step: int, waits: dict[str, Any]
) -> None:
    backup, result, expected = (tmp_path / name for name in ("backup", "result.npz", "one.npz"))
    jobs = {"worker": number}
    common = {"epochs": 2, **waits, "waits_at": None, "stuck_at": None, "stuck_after": None}
    stopped = start(jobs, **{**common, **waits}, backup=str(backup), save_freq=3)
    stopped.wait_for_outputs(range(number), f"step {step}\n")
    stopped.send_signal(number - 1, signal.SIGTERM)
    assert_all_end(stopped)  # nothing else ends them
    assert "what counts is the newest backup" in stopped.output(number - 1)
    whole = start(jobs, **common, result=str(expected))
    resumed = start(jobs, **common, result=str(result), backup=str(backup), save_freq=1000)
    for worker in [*resumed.wait(), *whole.wait()]:
        assert worker.exit_code == 0, worker.output
    assert_same_variables(result, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.full
def test_a_second_training_with_the_folder_of_a_first_says_so_and_the_first_continues(
    start: Any, tmp_path: Path
) -> None:
    backup = tmp_path / "backup"
    first = start({"worker": 1}, backup=str(backup), save_freq=3)
    first.wait_for_output(0, "training")
    second = start({"worker": 2}, backup=str(backup))
    for result in second.wait():
        assert result.exit_code == 1, result.output
        assert "ValueError: The chief cannot write backups" in second.output(1)
    error = second.output(0).splitlines()[-1]
    assert error.startswith("ValueError: Another training writes its backups here.")
    assert f"backup_dir={backup}, locked by process " in error
    first.send_signal(0, signal.SIGKILL)
    first.wait()
    restarted = start({"worker": 1}, backup=str(backup))
    restarted.wait_for_output(0, "step ")  # in the middle of an epoch


@pytest.mark.quick("fit-2-SIGTERM-None-3")
@pytest.mark.parametrize(
    ("mode", "number", "name", "plan", "lag"),
    [
        ("fit", 2, "SIGTERM", None, 3),
        ("fit", 3, "SIGTERM", None, 3),
        ("predict", 2, "SIGTERM", None, 3),
        ("fit", 2, "SIGINT", None, None),
        ("fit", 3, "SIGINT", None, None),
        ("evaluate", 2, "SIGINT", None, None),
        ("predict", 2, "SIGINT", None, None),
        *((mode, 2, "SIGTERM", PLAN, None) for mode in ("fit", "evaluate", "predict")),
    ],
)
def test_a_signal_to_one_worker_ends_all(
    start: Any, mode: str, number: int, name: str, plan: str | None, lag: int | None
) -> None:
    sent = int(signal.Signals[name])
    at = [None, 10, None][:number]
    workers = start({"worker": number}, mode=mode, plan=plan, lag=lag, signal_at=at, signal=sent)
    if name == "SIGTERM":
        assert_all_end(workers)
        return
    assert_all_end(workers, -signal.SIGINT)
    assert all("KeyboardInterrupt" in workers.output(index) for index in range(number))


WAYS = {
    "local-training": ({"worker": 2}, {"local": "sync_easgd"}),
    "custom-loop": ({"worker": 2}, {"mode": "custom_loop"}),
    "hybrid": ({"worker": 1, "async": 1}, {"hybrid": True}),
    "hybrid-group": ({"worker": 2, "async": 1}, {"hybrid": True}),
}


@pytest.mark.full
@pytest.mark.parametrize(("jobs", "options"), WAYS.values(), ids=WAYS)
def test_workers_that_all_get_the_signal_end_by_it(
    start: Any, jobs: dict[str, int], options: dict[str, Any]
) -> None:
    workers = start(jobs, **options)
    number = sum(jobs.values())
    workers.wait_for_outputs(range(number), "training")
    for index in range(number):
        workers.send_signal(index, signal.SIGTERM)
    # one that loses another on its way there says so, and ends by its own signal
    for result in workers.wait():
        assert result.exit_code == TERMINATED, result.output


@pytest.mark.full
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, TERMINATED), (signal.SIGINT, 128 + signal.SIGINT)]
)
def test_a_second_signal_ends_a_worker_that_waits_for_another(
    start: Any, number: int, code: int
) -> None:
    workers = start({"worker": 2}, stuck_at=[8, None])
    workers.wait_for_output(0, "stuck")
    workers.wait_for_output(1, "training")
    workers.send_signal(1, number)
    workers.wait_for_output(1, "send it again to stop at once")
    workers.send_signal(1, number)
    result = workers.wait_for(1, timeout=20)  # the other one is stuck
    assert result.exit_code == code, result.output


@pytest.mark.full
@pytest.mark.parametrize(
    ("number", "codes"),
    [(signal.SIGTERM, [TERMINATED]), (signal.SIGINT, [-signal.SIGINT, 128 + signal.SIGINT])],
)
def test_one_signal_ends_a_worker_that_waits_before_its_first_step(
    start: Any, number: int, codes: list[int]
) -> None:
    workers = start({"worker": 2}, mode="wait_at_start")
    workers.wait_for_output(0, "stuck")
    workers.wait_for_output(1, "joined")
    workers.send_signal(1, number)
    result = workers.wait_for(1, timeout=60)
    assert result.exit_code in codes, result.output


@pytest.mark.full
def test_a_handler_of_the_users_own_is_called(start: Any) -> None:
    workers = start({"worker": 2}, mode="handler", epochs=3, signal_at=[7, None])
    for result in workers.wait():
        assert result.exit_code == 0, result.output
        assert "trained" in result.output
    assert workers.output(0).count("my own handler") == 1


@pytest.mark.full
def test_a_process_that_a_worker_forks_ends_by_sigterm(start: Any) -> None:
    workers = start({"worker": 2}, mode="fork", epochs=1)
    for result in workers.wait():
        assert result.exit_code == 0, result.output
        assert "child ended by 15" in result.output


@pytest.mark.full
def test_the_launcher_ends_its_workers_without_killing_them(launch: Any, tmp_path: Path) -> None:
    """The grace period is longer than the test may take."""
    backup = tmp_path / "backup"
    process = launch("program_stop.py", {"backup": str(backup)}, "--grace-seconds", "1000")
    assert process.wait_for_output("training", 120), process.text("stderr")
    os.kill(process.process_id, signal.SIGTERM)
    assert process.join(120), process.text("stderr")
    assert process.result().exit_code == TERMINATED
    assert backup.exists()
