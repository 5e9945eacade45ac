"""Workers and services that are killed, stopped, late or wrong."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from hybrid_clusters import (
    BATCH,
    EPOCHS,
    MANY,
    SAMPLES,
    VARIANCE,
    Cluster,
    assert_equal_weights,
    assert_shared,
    ended_well,
    run,
    sample_counts,
)

PAIR, GROUP = {"worker": 1, "async": 1}, {"worker": 2, "async": 1}

TIMEOUT_SECONDS = 2
"""Of what loses its service here."""
LONGEST_SECONDS = 60.0
"""Steps to the next exchange, one time-out, and what a busy machine takes for both."""


@pytest.mark.full
def test_a_slow_worker_is_not_gone(start_workers: Any, tmp_path: Path) -> None:
    # its exchange takes longer than the silence after which a worker counts as gone
    options = {"timeout_seconds": 2.0, "period": 20}
    results = run(start_workers, tmp_path, PAIR, slow=0.02, fast=0.015, **options)
    leader = results["worker_0"]
    assert leader["used"][1] > 0
    assert sum(leader["used"]) == EPOCHS * SAMPLES
    assert_equal_weights(results)


@pytest.mark.full
@pytest.mark.parametrize("comes_back", [False, True])
def test_a_killed_async_worker_holds_nobody_up(
    start_workers: Any, tmp_path: Path, comes_back: bool
) -> None:
    cluster = Cluster(start_workers, tmp_path, GROUP, timeout_seconds=2)
    names = ["worker_0", "worker_1"]
    others = [cluster.start(*names)]
    victim = cluster.start("async_0")
    cluster.wait_for_step("async_0", 3)
    victim.send_signal(0)
    if comes_back:
        victim.wait_for(0)
        others.append(cluster.start("async_0"))
        names.append("async_0")
    ended_well(*others)
    results = {name: cluster.result(name) for name in names}
    assert_equal_weights(results)
    leader = results["worker_0"]
    claimed, used = leader["claimed"], leader["used"]
    # it held one batch, and had not told of the steps since its last exchange
    assert 0 < claimed[1] * BATCH - used[1] <= BATCH + 2 * BATCH
    assert claimed[0] * BATCH == used[0] and sum(claimed) == MANY * SAMPLES // BATCH
    assert sample_counts(results).max() <= MANY


@pytest.mark.full
@pytest.mark.parametrize("is_late", [False, True], ids=["stopped", "late"])
def test_a_stopped_or_late_async_worker_has_its_part(
    start_workers: Any, tmp_path: Path, is_late: bool
) -> None:
    cluster = Cluster(start_workers, tmp_path, PAIR)
    group = cluster.start("worker_0")
    if is_late:
        cluster.wait_for_step("worker_0", 12)
        worker = cluster.start("async_0")
    else:
        worker = cluster.start("async_0")
        cluster.wait_for_step("async_0", 2)
        worker.send_signal(0, signal.SIGSTOP)
        cluster.wait_for_step("worker_0", cluster.step("worker_0") + 15)
        worker.send_signal(0, signal.SIGCONT)
    ended_well(group, worker)
    assert_shared({name: cluster.result(name) for name in ("worker_0", "async_0")}, MANY)


@pytest.mark.quick("raise-worker_0")
@pytest.mark.parametrize(
    ("on_loss", "victim"), [("raise", "worker_0"), ("raise", "ps_0"), ("continue", "worker_0")]
)
def test_the_service_is_lost(start_workers: Any, tmp_path: Path, on_loss: str, victim: str) -> None:
    options = {"timeout_seconds": TIMEOUT_SECONDS, "on_service_loss": on_loss, "epochs": 4}
    jobs = PAIR if victim == "worker_0" else {**PAIR, "ps": 1}
    cluster = Cluster(start_workers, tmp_path, jobs, **options)
    killed = cluster.start(victim)
    names = ["async_0"] if victim == "worker_0" else ["async_0", "worker_0"]
    workers = cluster.start(*names)
    cluster.wait_for_step("async_0", 3)
    killed.send_signal(0)
    said = "ServiceLostError" if on_loss == "raise" else "Training continues alone"
    for index in range(len(names)):
        workers.wait_for_output(index, said, LONGEST_SECONDS)
    results = workers.wait()
    if on_loss == "raise":
        for result in results:
            assert result.exit_code != 0
            assert "Its process may be gone" in result.output
    else:
        assert results[0].exit_code == 0, results[0].output
        # all batches are its own from then on
        assert cluster.result("async_0")["steps"] > SAMPLES // BATCH


@pytest.mark.full
@pytest.mark.parametrize("what", ["secret", "messages (wire, partition_bytes)"])
def test_what_is_not_the_leaders_is_refused(start_workers: Any, tmp_path: Path, what: str) -> None:
    cluster = Cluster(start_workers, tmp_path, PAIR, epochs=2)
    options = {"communication_dtype": "float16"}
    if what == "secret":
        options = {}
        cluster.environments["async_0"]["KERAS_HET_SECRET"] = "one that was guessed"
    group, worker = cluster.start("worker_0"), cluster.start("async_0", **options)
    (refused,) = worker.wait()
    assert refused.exit_code != 0
    assert "PermissionError" in refused.output and what in refused.output
    ended_well(group)
    assert cluster.result("worker_0")["used"] == [2 * SAMPLES, 0]


def test_a_rule_for_another_number_of_workers_is_refused(
    start_workers: Any, tmp_path: Path
) -> None:
    settings = {"learning_rate": 0.02, "compensation": 0.04, "num_workers": 7}
    rule = {"class_name": "DelayCompensated", "config": settings}
    cluster = Cluster(start_workers, tmp_path, PAIR, rule=rule)
    (leader,) = cluster.start("worker_0").wait()
    assert leader.exit_code != 0
    assert "was made for 7 workers. Received: a TF_CONFIG with 2" in leader.output


WAITING = {
    "round robin": ("round_robin_easgd", {"ps": 1, "async": 2}),
    "round robin, two tasks": ("round_robin_easgd", {"ps": 2, "async": 2}),
}


@pytest.mark.full
@pytest.mark.parametrize("name", WAITING)
def test_a_worker_that_others_wait_for_is_given_up_and_returns(
    start_workers: Any, tmp_path: Path, name: str
) -> None:
    rule, jobs = WAITING[name]
    options = {"timeout_seconds": 2, "partition_bytes": 64, "rule": rule, "validates": False}
    epochs = 2 * MANY
    cluster = Cluster(start_workers, tmp_path, jobs, epochs=epochs, **options)
    serving = [cluster.start(f"ps_{index}") for index in range(jobs["ps"])]
    stays, victim = cluster.start("async_0"), cluster.start("async_1")
    cluster.wait_for_step("async_1", 3)
    victim.send_signal(0)
    victim.wait_for(0)
    # so many steps it takes only if nobody waits for the other any more
    cluster.wait_for_step("async_0", cluster.step("async_0") + 20)
    (tmp_path / "async_1.step").unlink()
    again = cluster.start("async_1")
    cluster.wait_for_step("async_1", 3)
    service, *_ = ended_well(*serving, stays, again)
    assert "Async worker 1 is gone; the others do not wait for it." in service
    results = {task: cluster.result(task) for task in ("ps_0", "async_0", "async_1")}
    assert_equal_weights(results)
    claimed, used = results["ps_0"]["claimed"], results["ps_0"]["used"]
    assert sum(claimed) == epochs * SAMPLES // BATCH
    assert claimed[0] * BATCH == used[0] and claimed[1] * BATCH > used[1] > 0
    assert sample_counts(results).max() <= epochs


@pytest.mark.full
@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_training_attaches_again_to_a_service_that_returns(
    start_workers: Any, tmp_path: Path, how: str
) -> None:
    options = {"on_service_loss": "continue", "partition_bytes": 64}
    jobs = {**PAIR, "ps": 2}
    cluster = Cluster(start_workers, tmp_path, jobs, timeout_seconds=TIMEOUT_SECONDS, **options)
    first, second = cluster.start("ps_0"), cluster.start("ps_1")
    group, worker = cluster.start("worker_0"), cluster.start("async_0")
    cluster.wait_for_step("async_0", 3)
    first.send_signal(0, signal.SIGSTOP if how == "stopped" else signal.SIGKILL)
    for each in (group, worker):
        each.wait_for_output(0, "continues alone", LONGEST_SECONDS)
    # the step after the next exchange comes only when the service was given up
    cluster.wait_for_step("worker_0", cluster.step("worker_0") + 6)
    if how == "stopped":
        first.send_signal(0, signal.SIGCONT)
    else:
        first = cluster.start("ps_0")
    output, *_ = ended_well(group, worker, first, second)
    assert "continues alone" in output and "answers again" in output, output
    results = {name: cluster.result(name) for name in ("worker_0", "async_0")}
    assert_equal_weights(results)
    counts = sample_counts(results)
    assert counts.min() >= MANY
    # both train on what they are at, and the group on what follows, while the service is away
    assert counts.mean() < 1.5 * MANY
    assert results["worker_0"]["history"]["val_loss"][-1] < 0.4 * VARIANCE
