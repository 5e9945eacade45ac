"""A sync group and async workers in one fit."""

from __future__ import annotations

import json
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked_workers import cluster_environments

import keras_het
from keras_het.launch.emulation import Emulation
from keras_het.launch.free_ports import ReservedPorts
from keras_het.strategy.rules import AsyncSGD

SAMPLES, BATCH, EPOCHS = 360, 12, 3
MANY = 8  # epochs, where the test acts while they train: longer than a worker takes to start
VARIANCE = 55  # of the labels: the loss of a model that has learnt nothing
SECRET = {"KERAS_HET_SERVICE_SECRET": "a secret that only tests know"}


def with_variants(names: Any, kept: str) -> list[Any]:
    """Parameters, of which all but one are not repeated on the oldest TensorFlow."""
    return [pytest.param(n, marks=() if n == kept else pytest.mark.variant) for n in names]


def environments(
    jobs: dict[str, int], slow: float = 0.002, fast: float = 0.001
) -> list[dict[str, str]]:
    """One environment a task; async workers take `slow` seconds a sample."""
    ports = ReservedPorts(1)
    ports.release()
    ports.close()
    common = {**SECRET, "KERAS_HET_SERVICE_ADDRESS": ports.addresses[0]}
    found = cluster_environments(jobs, common)
    emulated = {
        seconds: Emulation((1.0,), seconds_per_sample=seconds).environment_of(0)
        for seconds in (slow, fast)
    }
    for environment in found:
        task = json.loads(environment["TF_CONFIG"])["task"]["type"]
        environment.update(emulated[slow if task == "async" else fast])
    return found


def run(
    start: Any, folder: Path, jobs: dict[str, int], fast: float = 0.001, **options: Any
) -> dict[str, Any]:
    options = {"epochs": EPOCHS, "timeout_seconds": 60, **options}
    workers = start(
        "program_hybrid.py",
        arguments=[folder, json.dumps(options)],
        environments=environments(jobs, fast=fast),
    )
    for worker in workers.wait():
        assert worker.exit_code == 0, worker.output
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


def sample_counts(results: dict[str, Any]) -> np.ndarray:
    """How often each sample was used, over all tasks that have a share of their own."""
    seen = [i for result in results.values() for epoch in result["seen"] for i in epoch]
    return np.bincount(seen, minlength=SAMPLES)


def assert_equal_weights(results: dict[str, Any], exact: bool = True) -> None:
    first, *others = [result["weights"] for result in results.values()]
    for other in others:
        for one, two in zip(first, other, strict=True):
            np.testing.assert_array_equal(np.array(one), np.array(two))


@pytest.mark.parametrize("jobs", [{"worker": 1, "async": 1}, {"worker": 2, "async": 2}])
def test_every_sample_is_used_once_an_epoch_and_all_end_with_the_center(
    start_workers: Any, tmp_path: Path, jobs: dict[str, int]
) -> None:
    # slow enough that every async worker gets its part, however late it starts
    results = run(start_workers, tmp_path, jobs, fast=0.01, period=3)
    assert len(results) == sum(jobs.values())
    assert sample_counts(results).tolist() == [EPOCHS] * SAMPLES
    leader = results["worker_0"]
    assert sum(leader["used"]) == EPOCHS * SAMPLES
    assert sum(leader["claimed"]) == EPOCHS * SAMPLES // BATCH
    assert all(count > 0 for count in leader["used"])
    assert_equal_weights(results)
    assert leader["history"]["val_loss"][-1] < 0.4 * VARIANCE


RULES = {
    "server-side Adam": {
        "rule": {"optimizer": {"class_name": "Adam", "config": {"learning_rate": 0.05}}}
    },
    "gradients": {"rule": {"class_name": "AsyncSGD", "config": {"learning_rate": 0.02}}},
    "delay compensated": {
        "rule": {
            "class_name": "DelayCompensated",
            "config": {"learning_rate": 0.02, "compensation": 0.04, "num_workers": 2},
        }
    },
    "elastic": {"rule": "async_easgd"},
    "bounded staleness": {"rule": "delta", "staleness_bound": 1},
    "several steps at once": {"rule": "delta", "steps_per_execution": 4},
}


@pytest.mark.parametrize("rule", with_variants(RULES, "gradients"))
def test_rules(start_workers: Any, tmp_path: Path, rule: str) -> None:
    jobs = {"worker": 1, "async": 1}
    results = run(start_workers, tmp_path, jobs, fast=0.004, period=2, **RULES[rule])
    counts = sample_counts(results)
    assert counts.tolist() == [EPOCHS] * SAMPLES
    assert_equal_weights(results)
    leader = results["worker_0"]
    assert sum(leader["used"]) == EPOCHS * SAMPLES
    assert leader["history"]["val_loss"][-1] < 0.5 * VARIANCE


def test_a_backup_has_center_versions_and_the_services_optimizer(
    start_workers: Any, tmp_path: Path
) -> None:
    adam = {"optimizer": {"class_name": "Adam", "config": {"learning_rate": 0.05}}}
    jobs, backup = {"worker": 1, "async": 1}, str(tmp_path / "backup")
    common = {"rule": adam, "period": 2, "backup": backup}
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    first = run(start_workers, folders[0], jobs, **{**common, "epochs": 1})
    with np.load(Path(backup) / "service.npz") as state:
        saved = {name: state[name] for name in state}
    assert saved["versions"].tolist() == first["worker_0"]["versions"]
    assert any(np.abs(array).max() > 0 for name, array in saved.items() if name != "versions")
    second = run(start_workers, folders[1], jobs, **{**common, "epochs": 3})
    # the first epoch is not trained again, and versions go on
    assert len(second["worker_0"]["seen"]) == 2
    assert sample_counts(second).tolist() == [2] * SAMPLES
    pushes = np.array(second["worker_0"]["versions"]) - first["worker_0"]["versions"]
    assert pushes.min() > 20
    assert (
        second["worker_0"]["history"]["val_loss"][0] < first["worker_0"]["history"]["val_loss"][0]
    )
    assert_equal_weights(second)


SHARES = {"data_shares": [0.4, 0.6], "steps": [2, 3], "second_steps": [1, 2]}
ALONE = {
    "async_easgd": "async_easgd",
    "delta": "delta",
    "round_robin_easgd": "round_robin_easgd",
    "ashl": {"class_name": "ASHL", "config": {**SHARES, "loss_threshold": 10.0}},
    "compressed ashl": {
        "class_name": "ASHL",
        "config": {**SHARES, "loss_threshold": 10.0, "compression_ratios": [0.5, 0.8]},
    },
}


@pytest.mark.parametrize("name", with_variants(ALONE, "ashl"))
def test_async_workers_alone(start_workers: Any, tmp_path: Path, name: str) -> None:
    rule = ALONE[name]
    results = run(start_workers, tmp_path, {"ps": 1, "async": 2}, period=2, rule=rule)
    assert sample_counts(results).tolist() == [EPOCHS] * SAMPLES
    assert_equal_weights(results)
    service = results["ps_0"]
    assert sum(service["used"]) == EPOCHS * SAMPLES and min(service["used"]) > 0
    assert service["history"]["val_loss"][-1] < 0.5 * VARIANCE


@pytest.mark.parametrize("rule", ["streaming_diloco", "diloco", "sync_easgd"])
def test_rules_in_which_all_exchange_at_once_are_refused(rule: str) -> None:
    with pytest.raises(ValueError, match="LocalTraining"):
        keras_het.callbacks.HybridAggregation(rule)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"rule": "gossip"}, "gossip"),
        ({"period": 0}, "period must be a whole number"),
        ({"async_batch_size": 2.5}, "async_batch_size must be"),
        ({"staleness_bound": -1}, "staleness_bound must be"),
        ({"on_service_loss": "panic"}, '"raise" or "continue"'),
        ({"service": "nowhere"}, '"auto" or "spread"'),
        ({"rule": AsyncSGD(0.1), "on_service_loss": "continue"}, "their own optimizer"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        keras_het.callbacks.HybridAggregation(**arguments)


def run_with_service(
    start: Any, folder: Path, jobs: dict[str, int], **options: Any
) -> dict[str, Any]:
    """Runs a cluster whose tasks of the job `ps` run `keras-het serve`."""
    options = {"epochs": EPOCHS, "timeout_seconds": 60, "partition_bytes": 64, **options}
    tasks = environments(jobs, fast=0.006)
    for environment in tasks:
        del environment["KERAS_HET_SERVICE_ADDRESS"]
    serving = [e for e in tasks if json.loads(e["TF_CONFIG"])["task"]["type"] == "ps"]
    training = [e for e in tasks if e not in serving]
    arguments = [folder, json.dumps(options)]
    services = start("program_serve.py", arguments=["--once"], environments=serving)
    workers = start("program_hybrid.py", arguments=arguments, environments=training)
    for each in [*workers.wait(), *services.wait()]:
        assert each.exit_code == 0, each.output
    assert all("training has ended" in each.output for each in services.wait())
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


SERVICES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "one task": ({"worker": 1, "async": 1, "ps": 1}, {}),
    "two tasks": ({"worker": 2, "async": 1, "ps": 2}, {"rule": "async_easgd"}),
    "gradients": (
        {"worker": 1, "async": 1, "ps": 2},
        {"rule": {"class_name": "AsyncSGD", "config": {"learning_rate": 0.02}}},
    ),
    "members and a task": ({"worker": 2, "async": 1, "ps": 1}, {"service": "spread"}),
}


@pytest.mark.parametrize("name", with_variants(SERVICES, "two tasks"))
def test_service_on_tasks_of_its_own(start_workers: Any, tmp_path: Path, name: str) -> None:
    jobs, options = SERVICES[name]
    results = run_with_service(start_workers, tmp_path, jobs, period=2, **options)
    assert len(results) == jobs["worker"] + jobs["async"]
    assert sample_counts(results).tolist() == [EPOCHS] * SAMPLES
    leader = results["worker_0"]
    assert sum(leader["used"]) == EPOCHS * SAMPLES and min(leader["used"]) > 0
    assert len(leader["versions"]) > 4 and min(leader["versions"]) > EPOCHS
    assert_equal_weights(results)
    assert leader["history"]["val_loss"][-1] < 0.5 * VARIANCE


@pytest.mark.variant
def test_service_spread_over_the_sync_group(start_workers: Any, tmp_path: Path) -> None:
    jobs = {"worker": 2, "async": 1}
    options = {"service": "spread", "partition_bytes": 64, "period": 2}
    results = run(start_workers, tmp_path, jobs, fast=0.006, **options)
    assert sample_counts(results).tolist() == [EPOCHS] * SAMPLES
    assert_equal_weights(results)


@pytest.mark.variant
def test_a_backup_of_a_service_on_other_tasks(start_workers: Any, tmp_path: Path) -> None:
    adam = {"optimizer": {"class_name": "Adam", "config": {"learning_rate": 0.05}}}
    jobs, backup = {"worker": 1, "async": 1, "ps": 2}, str(tmp_path / "backup")
    common = {"rule": adam, "period": 2, "backup": backup}
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    first = run_with_service(start_workers, folders[0], jobs, **{**common, "epochs": 1})
    second = run_with_service(start_workers, folders[1], jobs, **{**common, "epochs": 3})
    assert sample_counts(second).tolist() == [2] * SAMPLES
    pushes = np.array(second["worker_0"]["versions"]) - first["worker_0"]["versions"]
    assert pushes.min() > 20  # versions go on where they were
    assert_equal_weights(second)


@pytest.mark.variant
def test_an_epoch_without_own_batches(start_workers: Any, tmp_path: Path) -> None:
    # the group claims two periods ahead: the whole first epoch
    jobs, options = {"worker": 1, "async": 2}, {"period": SAMPLES // BATCH // 2, "epochs": 4}
    results = run(start_workers, tmp_path, jobs, fast=0.01, **options)
    of_async = [results[name]["seen"] for name in ("async_0", "async_1")]
    assert all(seen[0] == [] for seen in of_async)
    assert sum(len(epoch) for seen in of_async for epoch in seen) > 0
    assert sample_counts(results).tolist() == [4] * SAMPLES


@pytest.mark.variant
@pytest.mark.parametrize("jobs", [{"worker": 2, "async": 1}, {"ps": 1, "async": 2}])
def test_two_fits(start_workers: Any, tmp_path: Path, jobs: dict[str, int]) -> None:
    results = run(start_workers, tmp_path, jobs, fast=0.006, period=3, fits=2)
    assert sample_counts(results).tolist() == [2 * EPOCHS] * SAMPLES
    assert_equal_weights(results)


@pytest.mark.variant
def test_a_slow_worker_is_not_gone(start_workers: Any, tmp_path: Path) -> None:
    # its exchange takes longer than the silence after which a worker counts as gone
    jobs, seconds = {"worker": 1, "async": 1}, 2.0
    tasks = environments(jobs, slow=0.02, fast=0.015)
    options = {"epochs": EPOCHS, "timeout_seconds": seconds, "period": 20}
    arguments = [tmp_path, json.dumps(options)]
    workers = start_workers("program_hybrid.py", arguments=arguments, environments=tasks)
    for worker in workers.wait():
        assert worker.exit_code == 0, worker.output
    results = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    leader = results["worker_0"]
    assert leader["used"][1] > 0
    assert sum(leader["used"]) == EPOCHS * SAMPLES
    assert_equal_weights(results)


class Cluster:
    """A hybrid cluster whose tasks the test treats badly."""

    def __init__(self, start: Any, folder: Path, jobs: dict[str, int], **options: Any) -> None:
        self.folder = folder
        self._start = start
        self._arguments = [folder, json.dumps({"epochs": MANY, "period": 2, **options})]
        # slow enough that the test can act while they train
        environments_of_tasks = environments(jobs, slow=0.008, fast=0.008)
        names = [f"{job}_{index}" for job, count in jobs.items() for index in range(count)]
        self._environments = dict(zip(names, environments_of_tasks, strict=True))

    def start(self, *names: str) -> Any:
        return self._start(
            "program_hybrid.py",
            arguments=self._arguments,
            environments=[self._environments[name] for name in names],
        )

    def wait_for_step(self, name: str, step: int) -> None:
        path = self.folder / f"{name}.step"
        wait_until(
            lambda: path.exists() and int(path.read_text() or 0) >= step, f"{name} at {step}"
        )

    def result(self, name: str) -> dict[str, Any]:
        return dict(json.loads((self.folder / f"{name}.json").read_text()))


def wait_until(is_true: Any, what: str, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    never = threading.Event()
    while not is_true():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        never.wait(0.02)


def test_a_killed_async_worker_holds_nobody_up(start_workers: Any, tmp_path: Path) -> None:
    cluster = Cluster(start_workers, tmp_path, {"worker": 2, "async": 1}, timeout_seconds=2)
    group = cluster.start("worker_0", "worker_1")
    victim = cluster.start("async_0")
    cluster.wait_for_step("async_0", 3)
    victim.send_signal(0)
    for worker in group.wait():
        assert worker.exit_code == 0, worker.output
    results = {name: cluster.result(name) for name in ("worker_0", "worker_1")}
    assert_equal_weights(results)
    leader = results["worker_0"]
    claimed, used = leader["claimed"], leader["used"]
    # it held one batch, and had not told of the steps since its last exchange
    assert 0 < claimed[1] * BATCH - used[1] <= BATCH + 2 * BATCH
    assert claimed[0] * BATCH == used[0] and sum(claimed) == MANY * SAMPLES // BATCH
    assert sample_counts(results).max() <= MANY


@pytest.mark.variant
def test_a_stopped_async_worker_goes_on_later(start_workers: Any, tmp_path: Path) -> None:
    cluster = Cluster(start_workers, tmp_path, {"worker": 1, "async": 1})
    group, worker = cluster.start("worker_0"), cluster.start("async_0")
    cluster.wait_for_step("async_0", 2)
    worker.send_signal(0, signal.SIGSTOP)
    before = int((tmp_path / "worker_0.step").read_text())
    cluster.wait_for_step("worker_0", before + 15)
    worker.send_signal(0, signal.SIGCONT)
    for each in [*group.wait(), *worker.wait()]:
        assert each.exit_code == 0, each.output
    results = {name: cluster.result(name) for name in ("worker_0", "async_0")}
    assert_equal_weights(results)
    assert sample_counts(results).tolist() == [MANY] * SAMPLES


def test_a_late_worker_joins(start_workers: Any, tmp_path: Path) -> None:
    cluster = Cluster(start_workers, tmp_path, {"worker": 1, "async": 1})
    group = cluster.start("worker_0")
    cluster.wait_for_step("worker_0", 12)
    late = cluster.start("async_0")
    for each in [*group.wait(), *late.wait()]:
        assert each.exit_code == 0, each.output
    results = {name: cluster.result(name) for name in ("worker_0", "async_0")}
    assert_equal_weights(results)
    assert sample_counts(results).tolist() == [MANY] * SAMPLES


@pytest.mark.parametrize("on_loss", ["raise", "continue"])
def test_the_service_is_lost(start_workers: Any, tmp_path: Path, on_loss: str) -> None:
    cluster = Cluster(
        start_workers,
        tmp_path,
        {"worker": 1, "async": 1},
        timeout_seconds=2,
        on_service_loss=on_loss,
    )
    leader, worker = cluster.start("worker_0"), cluster.start("async_0")
    cluster.wait_for_step("async_0", 3)
    leader.send_signal(0)
    (result,) = worker.wait()
    if on_loss == "raise":
        assert result.exit_code != 0
        assert "ServiceLostError" in result.output
        assert "did not answer" in result.output
    else:
        assert result.exit_code == 0, result.output
        assert "Training goes on alone" in result.output
        # all batches are its own from then on
        assert cluster.result("async_0")["steps"] > SAMPLES // BATCH


def test_another_secret_is_refused(start_workers: Any, tmp_path: Path) -> None:
    cluster = Cluster(start_workers, tmp_path, {"worker": 1, "async": 1})
    cluster._environments["async_0"]["KERAS_HET_SERVICE_SECRET"] = "one that was guessed"
    group, worker = cluster.start("worker_0"), cluster.start("async_0")
    (refused,) = worker.wait()
    assert refused.exit_code != 0
    assert "PermissionError" in refused.output and "secret" in refused.output
    (leader,) = group.wait()
    assert leader.exit_code == 0, leader.output
    assert cluster.result("worker_0")["used"] == [MANY * SAMPLES, 0]
