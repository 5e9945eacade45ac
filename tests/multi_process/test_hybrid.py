"""A sync group and async workers in one fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hybrid_clusters import (
    BATCH,
    EPOCHS,
    MANY,
    SAMPLES,
    VARIANCE,
    assert_equal_weights,
    assert_shared,
    environments,
    run,
    sample_counts,
)

from keras_het.fit.backup_folder import BackupFolder


@pytest.mark.quick("1-1")
@pytest.mark.parametrize(("group", "outside"), [(1, 1), (2, 2)])
def test_every_sample_is_used_once_an_epoch_and_all_end_with_the_center(
    start_workers: Any, tmp_path: Path, group: int, outside: int
) -> None:
    jobs = {"worker": group, "async": outside}
    # slow enough that every async worker gets its part, however late it starts
    options = {"period": 3, "arrays": True, "validates": 6, "without_callback": "async"}
    results = run(start_workers, tmp_path, jobs, fast=0.005 * group, **options)
    assert len(results) == sum(jobs.values())
    assert_shared(results)
    leader = results["worker_0"]
    assert leader["period"] == 3  # the callback's; async workers have none in their list
    assert sum(leader["used"]) == EPOCHS * SAMPLES
    assert sum(leader["claimed"]) == EPOCHS * SAMPLES // BATCH
    assert all(count > 0 for count in leader["used"])
    assert leader["history"]["val_loss"][-1] < 0.4 * VARIANCE
    # a batch of the group is a step of each member, and as many steps of an async worker
    fractions = {name: result["step_fraction"] for name, result in results.items()}
    members = {name: 1.0 for name in results if name.startswith("worker")}
    assert fractions == {**dict.fromkeys(results, 1.0 / jobs["worker"]), **members}


@pytest.mark.full
def test_telemetry_of_the_leader_knows_the_async_workers(
    start_workers: Any, tmp_path: Path
) -> None:
    from keras_het.telemetry.event_log import read_log

    jobs, log = {"worker": 2, "async": 1}, tmp_path / "log"
    options = {"telemetry": str(log), "epochs": MANY, "validates": False}
    results = run(start_workers, tmp_path, jobs, fast=0.01, period=2, **options)
    assert sample_counts(results).tolist() == [MANY] * SAMPLES
    (found,) = read_log(log)
    assert len(found.recording.devices) == 2
    assert (found.recording.compute > 0).all()
    exchanges = found.content.exchanges
    assert {each["worker"] for each in exchanges} == {0}
    assert all(each["staleness"] >= 0 and each["exchange_seconds"] > 0 for each in exchanges)
    assert all("samples_per_second" in result["history"] for result in results.values())


GRADIENTS = {"rule": {"class_name": "AsyncSGD", "config": {"learning_rate": 0.02}}}
ADAPTING = {"changes": {"rule": "delta"}, "gradients": GRADIENTS}


@pytest.mark.full
@pytest.mark.parametrize("rule", ADAPTING)
def test_each_task_finds_its_period(start_workers: Any, tmp_path: Path, rule: str) -> None:
    # a step takes the async worker 0.3 s, the group 0.07 s
    jobs = {"worker": 2, "async": 1}
    options = {"period": "auto", "epochs": MANY, "validates": False}
    results = run(start_workers, tmp_path, jobs, 0.012, 0.05, **options, **ADAPTING[rule])
    periods = {name: result["period"] for name, result in results.items()}
    assert periods["worker_0"] == periods["worker_1"] == 3  # the longest: 30 batches, 8 exchanges
    from keras_het.asynchronous.exchange.pace import FIRST_PERIOD

    # waiting for the answers counts, and takes long where all tasks share two CPUs
    assert periods["async_0"] < FIRST_PERIOD if rule == "changes" else 1 <= periods["async_0"] <= 7
    assert_shared(results, MANY)


PAIR, GROUP, ALONE = {"worker": 1, "async": 1}, {"worker": 2, "async": 1}, {"ps": 1, "async": 2}
ADAM = {"optimizer": {"class_name": "Adam", "config": {"learning_rate": 0.05}}}
COMPENSATION = {"learning_rate": 0.02, "compensation": 0.04, "num_workers": 2}
FACTORS = {
    "class_name": "AsyncSGD",
    "config": {
        "learning_rate": 0.01,
        "reference_batch_size": BATCH,
        "warmup_pushes": 30,
        "staleness_damping": True,
    },
}
MOMENTUM = {"rate": 0.01, "momentum": 0.5}
DELAYED = {"class_name": "delayed_nesterov", "config": {"period": 2}}
# Fast enough for either to get its part, and so many parts that each task holds some.
BESIDE, IN_PARTS = {"fast": 0.004}, {"fast": 0.006, "partition_bytes": 64}
TRAININGS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "server-side Adam": (PAIR, {**BESIDE, "rule": ADAM}),
    "gradients": (PAIR, {**BESIDE, **GRADIENTS}),
    "delay compensated": (
        PAIR,
        {**BESIDE, "rule": {"class_name": "DelayCompensated", "config": COMPENSATION}},
    ),
    # linear scaling, warm-up and damping at periods by which all push at the same rate
    "gradients, with all factors": (
        {"worker": 1, "async": 2},
        {"fast": 0.005, "slow": (0.01, 0.03), "period": "auto", "epochs": MANY, "rule": FACTORS},
    ),
    "elastic": (PAIR, {**BESIDE, "rule": "async_easgd"}),
    "elastic, without a lock": (PAIR, {**BESIDE, "rule": "hogwild_easgd", **MOMENTUM}),
    "elastic, with momentum": (PAIR, {**BESIDE, "rule": "async_measgd", **MOMENTUM}),
    "bounded staleness": (PAIR, {**BESIDE, "max_staleness": 1}),
    "compiled": (PAIR, {**BESIDE, "jit_compile": True}),
    "gradients, compiled": (PAIR, {**BESIDE, **GRADIENTS, "jit_compile": True}),
    "several steps at once": (PAIR, {**BESIDE, "steps_per_execution": 4}),
    "more steps at once than two periods": (PAIR, {**BESIDE, "steps_per_execution": 10}),
    "gradients, several steps at once": (PAIR, {**BESIDE, **GRADIENTS, "steps_per_execution": 4}),
    "alone": (ALONE, {}),
    "alone, elastic": (ALONE, {"rule": "async_easgd"}),
    "alone, delayed Nesterov": (ALONE, {"rule": DELAYED, "period": "auto"}),
    "delayed Nesterov": (PAIR, {**BESIDE, "rule": DELAYED}),
    "delayed Nesterov, service on two tasks": ({**GROUP, "ps": 2}, {**IN_PARTS, "rule": DELAYED}),
    "alone, round robin": (ALONE, {"rule": "round_robin_easgd"}),
    "service on a task": ({**PAIR, "ps": 1}, {**IN_PARTS, "rule": "own_delta"}),
    "service on two tasks": ({**GROUP, "ps": 2}, {**IN_PARTS, "rule": "async_easgd"}),
    "service of gradients": ({**PAIR, "ps": 2}, {**IN_PARTS, **GRADIENTS}),
    "service on members and a task": (
        {**GROUP, "ps": 1},
        {**IN_PARTS, "service_placement": "sharded"},
    ),
    "service on members": (GROUP, {**IN_PARTS, "service_placement": "sharded"}),
    "two fits": (GROUP, {"fast": 0.006, "period": 3, "fits": 2}),
    "alone, two fits": (ALONE, {"fast": 0.006, "period": 3, "fits": 2}),
}


@pytest.mark.full
@pytest.mark.parametrize("name", TRAININGS)
def test_trainings(start_workers: Any, tmp_path: Path, name: str) -> None:
    jobs, options = TRAININGS[name]
    results = run(start_workers, tmp_path, jobs, **{"period": 2, **options})
    serving = jobs.get("ps", 0) if "worker" in jobs else 0
    assert len(results) == sum(jobs.values()) - serving
    compiled = {result["compiled"] > 0 for result in results.values()}
    assert compiled == {"jit_compile" in options}
    epochs = options.get("epochs", EPOCHS)
    assert_shared(results, epochs * options.get("fits", 1))
    leader = results["worker_0" if "worker" in jobs else "ps_0"]
    # on a busy machine pushes of several periods come late: it has reached 0.62 of the variance
    assert leader["history"]["val_loss"][-1] < 0.75 * VARIANCE
    assert sum(leader["used"]) == epochs * SAMPLES  # in the last fit
    if "ps" in jobs:
        assert min(leader["used"]) > 0
    if serving:
        assert len(leader["versions"]) > 4 and min(leader["versions"]) > EPOCHS


def service_state(backup: str) -> dict[str, Any]:
    folder = BackupFolder(backup, 1)
    assert folder.find()
    prefix = "service/"
    return {n.removeprefix(prefix): v for n, v in folder.state().items() if n.startswith(prefix)}


def versions_in(saved: dict[str, Any]) -> Any:
    return np.array([int(value) for name, value in saved.items() if name.endswith("/version")])


@pytest.mark.full
@pytest.mark.parametrize("jobs", [PAIR, {**PAIR, "ps": 2}], ids=["leader", "tasks"])
def test_a_backup_has_center_versions_and_the_services_optimizer(
    start_workers: Any, tmp_path: Path, jobs: dict[str, int]
) -> None:
    backup = str(tmp_path / "backup")
    # slow enough that the async worker comes before the only epoch is over
    common = {**IN_PARTS, "fast": 0.03, "rule": ADAM, "period": 2, "backup": backup}
    first = run(start_workers, tmp_path / "first", jobs, **{**common, "epochs": 1})["worker_0"]
    saved = service_state(backup)
    if "ps" not in jobs:
        # of the epoch's end; each task may have something left to send at the end of training
        later = np.array(first["versions"]) - versions_in(saved)
        assert later.min() >= 0 and later.max() <= 3
    assert any(np.abs(array).max() > 0 for name, array in saved.items() if "/optimizer_" in name)
    results = run(start_workers, tmp_path / "second", jobs, **{**common, "epochs": 3})
    assert_shared(results, 2)
    # the first epoch is not trained again, and versions continue
    second = results["worker_0"]
    assert len(second["seen"]) == 2
    assert (np.array(second["versions"]) - versions_in(saved)).min() > 20
    losses = second["history"]["val_loss"]
    assert len(losses) == 3 and losses[0] == first["history"]["val_loss"][0] > losses[1]


@pytest.mark.full
@pytest.mark.parametrize("wire", ["float16", "bfloat16", 0.25])
def test_formats_of_messages(start_workers: Any, tmp_path: Path, wire: str) -> None:
    options = {
        **BESIDE,
        "period": 2,
        "epochs": 6,
        "top_k_ratio" if wire == 0.25 else "communication_dtype": wire,
    }
    results = run(start_workers, tmp_path, PAIR, **options)
    assert_shared(results, 6)  # the last message has all bits
    assert min(results["worker_0"]["used"]) > 0
    # what a message leaves out comes with the next one; who takes which batch differs anyway, so
    # that the loss goes up and down by a third of the variance: the lowest one counts
    assert np.min(results["worker_0"]["history"]["val_loss"][-3:]) < 0.25 * VARIANCE


@pytest.mark.full
def test_one_async_worker_alone_leaves_no_epoch_out(start_workers: Any, tmp_path: Path) -> None:
    # Keras ends its epoch with the last batch, and does not ask for another
    results = run(start_workers, tmp_path, {"ps": 1, "async": 1}, period=2)
    assert [len(epoch) for epoch in results["async_0"]["seen"]] == [SAMPLES] * EPOCHS
    assert_shared(results)


@pytest.mark.full
def test_small_batches_of_async_workers_alone(start_workers: Any, tmp_path: Path) -> None:
    # three steps for each batch of the data: Keras begins its next epoch before the data's
    jobs, options = {"ps": 1, "async": 2}, {"async_batch_size": 4, "validates": False}
    results = run(start_workers, tmp_path, jobs, period=2, **options)
    counts = sample_counts(results)
    assert counts.min() >= 1 and counts.max() <= EPOCHS
    assert_equal_weights(results)


def test_async_workers_alone_do_not_spread_the_service(start_workers: Any, tmp_path: Path) -> None:
    options = json.dumps({"service_placement": "sharded", "epochs": 1})
    (service,) = start_workers(
        "program_hybrid.py",
        arguments=[tmp_path, options],
        environments=environments({"ps": 1, "async": 1})[:1],
    ).wait()
    assert service.exit_code != 0 and "a TF_CONFIG without sync group" in service.output


@pytest.mark.full
def test_an_epoch_without_own_batches(start_workers: Any, tmp_path: Path) -> None:
    # the group claims two periods ahead: the whole first epoch
    jobs, options = {"worker": 1, "async": 2}, {"period": SAMPLES // BATCH // 2, "epochs": 4}
    results = run(start_workers, tmp_path, jobs, fast=0.01, **options)
    of_async = [results[name]["seen"] for name in ("async_0", "async_1")]
    assert all(seen[0] == [] for seen in of_async)
    assert sum(len(epoch) for seen in of_async for epoch in seen) > 0
    assert sample_counts(results).tolist() == [4] * SAMPLES
