"""A sync group and async workers in one fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked_workers import cluster_environments

from keras_het.launch.emulation import Emulation
from keras_het.launch.free_ports import ReservedPorts

SAMPLES, BATCH, EPOCHS = 360, 12, 3
VARIANCE = 55  # of the labels: the loss of a model that has learnt nothing
SECRET = {"KERAS_HET_SERVICE_SECRET": "a secret that only tests know"}


def environments(jobs: dict[str, int], slow: float = 0.002) -> list[dict[str, str]]:
    """One environment a task; async workers take `slow` seconds a sample."""
    ports = ReservedPorts(1)
    ports.release()
    ports.close()
    common = {**SECRET, "KERAS_HET_SERVICE_ADDRESS": ports.addresses[0]}
    found = cluster_environments(jobs, common)
    emulation = Emulation((1.0,), seconds_per_sample=slow).environment_of(0)
    fast = Emulation((1.0,), seconds_per_sample=0.001).environment_of(0)
    for environment in found:
        task = json.loads(environment["TF_CONFIG"])["task"]["type"]
        environment.update(emulation if task == "async" else fast)
    return found


def run(start: Any, folder: Path, jobs: dict[str, int], **options: Any) -> dict[str, Any]:
    options = {"epochs": EPOCHS, "timeout_seconds": 10, **options}
    workers = start(
        "program_hybrid.py",
        arguments=[folder, json.dumps(options)],
        environments=environments(jobs),
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
    results = run(start_workers, tmp_path, jobs, period=3)
    assert len(results) == sum(jobs.values())
    assert sample_counts(results).tolist() == [EPOCHS] * SAMPLES
    leader = results["worker_0"]
    assert sum(leader["used"]) == EPOCHS * SAMPLES
    assert sum(leader["claimed"]) == EPOCHS * SAMPLES // BATCH
    assert all(count > 0 for count in leader["used"])
    assert_equal_weights(results)
    assert leader["history"]["val_loss"][-1] < 0.4 * VARIANCE
