"""A worker that dies or hangs is one error on all others, which names it, within 15 seconds."""

from __future__ import annotations

import json
import signal
import time
from typing import Any

import pytest

# A requirement of the product, not a speed that depends on the machine.
LONGEST_SECONDS = 15.0
FOR_EVER = 10_000_000


def _start(start_workers: Any, jobs: dict[str, int], **options: Any) -> Any:
    workers = start_workers("program_fit.py", jobs, [json.dumps({"steps": FOR_EVER, **options})])
    for index in range(sum(jobs.values())):
        workers.wait_for_output(index, "training")
    return workers


def _assert_survivors_name(workers: Any, survivors: list[int], name: str) -> None:
    for index in survivors:
        result = workers.wait_for(index)
        assert result.exit_code == 1, result.output
        assert result.output.count("WorkerLostError: Lost ") == 1, result.output
        assert f"WorkerLostError: Lost {name} (127.0.0.1:" in result.output
        # One error: the text of TensorFlow's own is not chained to it.
        assert "During handling" not in result.output
        assert "errors_impl" not in result.output


LOSSES = [
    pytest.param(signal.SIGKILL, 1, {"worker": 3}, "worker 1", id="killed"),
    pytest.param(signal.SIGSTOP, 2, {"worker": 3}, "worker 2", id="stopped"),
    pytest.param(signal.SIGKILL, 0, {"worker": 3}, "worker 0", id="worker-0-killed"),
    pytest.param(signal.SIGSTOP, 0, {"worker": 2}, "worker 0", id="worker-0-stopped"),
    pytest.param(signal.SIGKILL, 0, {"chief": 1, "worker": 1}, "chief 0", id="chief-killed"),
]


@pytest.mark.quick("killed")
@pytest.mark.parametrize(("number", "lost", "jobs", "name"), LOSSES)
def test_survivors_name_the_lost_worker(
    start_workers: Any, number: int, lost: int, jobs: dict[str, int], name: str
) -> None:
    workers = _start(start_workers, jobs)
    workers.send_signal(lost, number)
    survivors = [index for index in range(sum(jobs.values())) if index != lost]
    _assert_survivors_name(workers, survivors, name)


@pytest.mark.alone
@pytest.mark.parametrize(("number", "lost", "jobs", "name"), LOSSES)
def test_survivors_know_in_time(
    start_workers: Any, number: int, lost: int, jobs: dict[str, int], name: str
) -> None:
    workers = _start(start_workers, jobs)
    since = time.monotonic()
    workers.send_signal(lost, number)
    survivors = [index for index in range(sum(jobs.values())) if index != lost]
    # The error, not the end: TensorFlow's own farewell to a hanging worker takes longer.
    workers.wait_for_outputs(survivors, f"WorkerLostError: Lost {name}")
    assert time.monotonic() - since < LONGEST_SECONDS


def test_a_custom_loop_ends_with_the_name_too(start_workers: Any) -> None:
    workers = _start(start_workers, {"worker": 2}, custom_loop=True)
    workers.send_signal(1, signal.SIGKILL)
    _assert_survivors_name(workers, [0], "worker 1")


def test_an_exception_of_one_worker_ends_the_others(start_workers: Any) -> None:
    workers = start_workers(
        "program_fit.py",
        {"worker": 3},
        [json.dumps({"steps": FOR_EVER, "raise_at": [None, 30, None]})],
    )
    failed = workers.wait_for(1)
    assert failed.exit_code == 1
    assert "ZeroDivisionError: a mistake in a callback" in failed.output
    assert "WorkerLostError" not in failed.output
    _assert_survivors_name(workers, [0, 2], "worker 1")
