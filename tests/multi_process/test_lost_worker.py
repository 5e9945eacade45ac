"""A worker that dies, hangs or never comes is one error on all others, which names it."""

from __future__ import annotations

import json
import signal
import threading
import time
from typing import Any

import pytest
from forked_workers import cluster_environments
from hybrid_clusters import SECRET

# How long a worker may be silent here; the default is half a minute.
PATIENCE = {"KERAS_HET_PEER_TIMEOUT_SECONDS": "3"}
# Requirements of the product, not speeds that depend on the machine. With machines that sum a call
# has to time out first.
LONGEST_SECONDS, LONGEST_SECONDS_OF_A_SUM = 15.0, 18.0
FOR_EVER = 10_000_000


def _start(start_workers: Any, jobs: dict[str, int], **options: Any) -> Any:
    """Tasks of which all that train do so; a worker sums by machines if there are any."""
    sums = {"gradient_reduction": "summation"} if "summation" in jobs else {}
    workers = start_workers(
        "program_fit.py",
        arguments=[json.dumps({"steps": FOR_EVER, **sums, **options})],
        environments=cluster_environments(jobs, {**PATIENCE, **SECRET}),
    )
    workers.wait_for_outputs(_that_train(jobs), "training")
    return workers


def _that_train(jobs: dict[str, int], lost: int | None = None) -> list[int]:
    number = sum(count for job, count in jobs.items() if job != "summation")
    return [index for index in range(number) if index != lost]


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
    pytest.param(signal.SIGKILL, 3, {"worker": 2, "summation": 2}, "summation 1", id="sums-killed"),
    pytest.param(
        signal.SIGSTOP, 3, {"worker": 2, "summation": 2}, "summation 1", id="sums-stopped"
    ),
    pytest.param(signal.SIGKILL, 2, {"worker": 3, "summation": 1}, "worker 2", id="summed-killed"),
]


@pytest.mark.quick("killed")
@pytest.mark.parametrize(("number", "lost", "jobs", "name"), LOSSES)
def test_survivors_name_the_lost_worker(
    start_workers: Any, number: int, lost: int, jobs: dict[str, int], name: str
) -> None:
    # Only one worker finds it, or all where it was worker 0: the others hear of it.
    workers = _start(start_workers, jobs, most_watched=1)
    workers.send_signal(lost, number)
    _assert_survivors_name(workers, _that_train(jobs, lost), name)


@pytest.mark.alone
@pytest.mark.parametrize(("number", "lost", "jobs", "name"), LOSSES)
def test_survivors_know_in_time(
    start_workers: Any, number: int, lost: int, jobs: dict[str, int], name: str
) -> None:
    workers = _start(start_workers, jobs)
    since = time.monotonic()
    workers.send_signal(lost, number)
    # The error, not the end: TensorFlow's own farewell to a hanging worker takes longer.
    workers.wait_for_outputs(_that_train(jobs, lost), f"WorkerLostError: Lost {name}")
    longest = LONGEST_SECONDS_OF_A_SUM if "summation" in jobs else LONGEST_SECONDS
    assert time.monotonic() - since < longest


@pytest.mark.full
@pytest.mark.parametrize("loop", ["custom_loop", "predicts"])
def test_other_loops_end_with_the_name_too(start_workers: Any, loop: str) -> None:
    workers = _start(start_workers, {"worker": 2}, **{loop: True})
    workers.send_signal(1, signal.SIGKILL)
    _assert_survivors_name(workers, [0], "worker 1")
    if loop == "predicts":  # raised there, not only shown at the end
        assert "raised WorkerLostError" in workers.wait_for(0).output


@pytest.mark.full
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


@pytest.mark.full
def test_a_worker_that_stands_still_for_a_while_is_waited_for(start_workers: Any) -> None:
    """With the default patience, for longer than TensorFlow's own heartbeats have."""
    workers = start_workers("program_fit.py", {"worker": 3}, [json.dumps({"steps": FOR_EVER})])
    workers.wait_for_outputs(range(3), "training")
    workers.send_signal(1, signal.SIGSTOP)
    threading.Event().wait(15)
    workers.send_signal(1, signal.SIGCONT)
    # all of them still come to the end of the same step
    workers.send_signal(2, signal.SIGTERM)
    for result in workers.wait():
        assert result.exit_code == 128 + signal.SIGTERM, result.output
        assert "Lost worker" not in result.output


@pytest.mark.full
def test_a_call_that_holds_the_interpreter_for_longer_is_survived(start_workers: Any) -> None:
    workers = start_workers(
        "program_fit.py",
        arguments=[json.dumps({"steps": 25, "hold_at": [None, 10]})],
        environments=cluster_environments({"worker": 2}, PATIENCE),
    )
    for result in workers.wait():
        assert result.exit_code == 0, result.output
        assert "finished" in result.output


@pytest.mark.full
def test_a_worker_that_never_comes_is_named(start_workers: Any) -> None:
    environments = cluster_environments({"worker": 2})
    address = json.loads(environments[0]["TF_CONFIG"])["cluster"]["worker"][1]
    workers = start_workers(
        "program_fit.py",
        arguments=[json.dumps({"steps": 5, "startup_timeout_seconds": 11})],
        environments=environments[:1],
    )
    result = workers.wait_for(0)
    assert f"Waiting for worker 1 ({address}), 10 s ..." in result.output
    assert result.exit_code == 1
    assert result.output.splitlines()[-1].startswith(
        f"TimeoutError: worker 1 ({address}) did not start within startup_timeout_seconds=11"
    )


@pytest.mark.full
def test_a_worker_restarted_alone_waits_until_the_others_have_restarted_too(
    start_workers: Any,
) -> None:
    environments = cluster_environments({"worker": 3}, PATIENCE)

    def start(places: list[int], **options: Any) -> Any:
        chosen = [environments[place] for place in places]
        arguments = [json.dumps({"steps": FOR_EVER, **options})]
        return start_workers("program_fit.py", arguments=arguments, environments=chosen)

    old = start([0, 1, 2], lingers=True)
    old.wait_for_outputs(range(3), "training")
    old.send_signal(1, signal.SIGKILL)
    old.wait_for_outputs([0, 2], "raised WorkerLostError")
    addresses = json.loads(environments[0]["TF_CONFIG"])["cluster"]["worker"]
    others = f"worker 0 ({addresses[0]}), worker 2 ({addresses[2]})"
    impatient = start([1], startup_timeout_seconds=3).wait_for(0, timeout=60)
    assert f"{others} still runs from an earlier start" in impatient.output.splitlines()[-1]
    alone = start([1])
    alone.wait_for_output(0, f"Waiting for {others}: still running from an earlier start")
    for index in (0, 2):
        old.send_signal(index, signal.SIGKILL)
        old.wait_for(index)
    rest = start([0, 2])
    rest.wait_for_outputs([0, 1], "training")
    alone.wait_for_output(0, "training")


@pytest.mark.full
def test_a_worker_that_takes_the_place_of_a_killed_one_at_once_ends_and_so_do_the_others(
    start_workers: Any,
) -> None:
    # so long that nobody ends by losing it
    environments = cluster_environments({"worker": 2}, {"KERAS_HET_PEER_TIMEOUT_SECONDS": "600"})
    arguments = [json.dumps({"steps": FOR_EVER})]
    old = start_workers("program_fit.py", arguments=arguments, environments=environments)
    old.wait_for_outputs(range(2), "training")
    new = start_workers("program_fit.py", arguments=arguments, environments=environments[1:])
    # and waits for its port, which then refuses no connection for longer than a moment
    new.wait_for_output(0, "still running from an earlier start")
    old.send_signal(1, signal.SIGKILL)
    survivor = old.wait_for(0, timeout=60)
    assert "WorkerLostError: Lost worker 1 (127.0.0.1:" in survivor.output
    ended = new.wait_for(0, timeout=60)
    address = json.loads(environments[0]["TF_CONFIG"])["cluster"]["worker"][0]
    told = f"TimeoutError: worker 0 ({address}) belonged to an earlier start, which has ended"
    assert ended.output.splitlines()[-1].startswith(told)


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_waits_for_others_can_be_ended(start_workers: Any, number: int) -> None:
    workers = start_workers(
        "program_fit.py",
        arguments=[json.dumps({"steps": 5})],
        environments=cluster_environments({"worker": 2})[:1],
    )
    workers.wait_for_output(0, "Waiting for worker 1")
    workers.send_signal(0, number)
    assert workers.wait_for(0, timeout=20).exit_code == -number
