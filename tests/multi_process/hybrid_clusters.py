"""Clusters of a sync group and async workers for tests, and what their tasks wrote."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from addresses import free_address
from forked_workers import cluster_environments

from keras_het.launch.local.worker_environment import Emulation

SAMPLES, BATCH, EPOCHS = 360, 12, 3
MANY = 8  # epochs, where the test acts while they train: longer than a worker takes to start
VARIANCE = 55  # of the labels: the loss of a model that has learnt nothing
SECRET = {"KERAS_HET_SECRET": "a secret that only tests know"}


def environments(
    jobs: dict[str, int], slow: float | tuple[float, ...] = 0.002, fast: float = 0.001
) -> list[dict[str, str]]:
    """One environment a task; async workers take `slow` seconds a sample, or each its own.

    Without a job `ps` the service gets an address of its own.
    """
    common = SECRET if "ps" in jobs else {**SECRET, "KERAS_HET_SERVICE_ADDRESS": free_address()}
    found = cluster_environments(jobs, common)
    for environment in found:
        task = json.loads(environment["TF_CONFIG"])["task"]
        own = slow[task["index"]] if task["type"] == "async" and isinstance(slow, tuple) else slow
        seconds = own if task["type"] == "async" else fast
        emulation = Emulation((1.0,), seconds_per_sample=seconds)
        environment.update(emulation.environment_of(0))
    return found


def run(
    start: Any,
    folder: Path,
    jobs: dict[str, int],
    fast: float = 0.001,
    slow: float | tuple[float, ...] = 0.002,
    **options: Any,
) -> dict[str, Any]:
    """Trains with all tasks at once; what each of them wrote, by its name.

    Beside a sync group, tasks of the job `ps` run `keras-het parameter-server`.
    """
    folder.mkdir(exist_ok=True)
    options = {"epochs": EPOCHS, "timeout_seconds": 60, **options}
    tasks = environments(jobs, slow, fast)
    serving = [task for task in tasks if "worker" in jobs and '"type": "ps"' in task["TF_CONFIG"]]
    services = start(
        "program_serve.py",
        arguments=["--once", "--import", "registered_rule"],
        environments=serving,
    )
    workers = start(
        "program_hybrid.py",
        arguments=[folder, json.dumps(options)],
        environments=[task for task in tasks if task not in serving],
    )
    outputs = ended_well(workers, services)
    assert not any("ran out of data" in output for output in outputs)  # Keras's, of shared epochs
    assert all("training has ended" in service.output for service in services.wait())
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


def ended_well(*clusters: Any) -> list[str]:
    results = [result for cluster in clusters for result in cluster.wait()]
    for result in results:
        assert result.exit_code == 0, result.output
    return [result.output for result in results]


def sample_counts(results: dict[str, Any]) -> np.ndarray:
    """How often each sample was used, over all tasks that have a share of their own."""
    seen = [i for result in results.values() for epoch in result["seen"] for i in epoch]
    return np.bincount(seen, minlength=SAMPLES)


def assert_shared(results: dict[str, Any], epochs: int = EPOCHS) -> None:
    """Each sample was used once in each epoch, and all tasks ended with the center."""
    assert sample_counts(results).tolist() == [epochs] * SAMPLES
    assert_equal_weights(results)


def assert_equal_weights(results: dict[str, Any], rtol: float = 0.0) -> None:
    """All tasks ended with the same bits, or with the rounding of what travels."""
    first, *others = [result["weights"] for result in results.values()]
    for other in others:
        for one, two in zip(first, other, strict=True):
            np.testing.assert_allclose(np.array(one), np.array(two), rtol=rtol, atol=rtol * 1e-2)


class Cluster:
    """A hybrid cluster whose tasks the test treats badly."""

    def __init__(self, start: Any, folder: Path, jobs: dict[str, int], **options: Any) -> None:
        self.folder = folder
        self._has_group = "worker" in jobs
        self._start = start
        self._options = {"epochs": MANY, "period": 2, **options}
        # slow enough that the test can act while they train
        tasks = environments(jobs, slow=0.008, fast=0.008)
        names = [f"{job}_{index}" for job, count in jobs.items() for index in range(count)]
        self.environments = dict(zip(names, tasks, strict=True))

    def start(self, *names: str, **other_options: Any) -> Any:
        """Start tasks; job ps runs `keras-het parameter-server`, or its first task the script."""
        serves = names[0].startswith("ps") and (self._has_group or names[0] != "ps_0")
        options = {**self._options, **other_options}
        return self._start(
            "program_serve.py" if serves else "program_hybrid.py",
            arguments=["--once"] if serves else [self.folder, json.dumps(options)],
            environments=[self.environments[name] for name in names],
        )

    def step(self, name: str) -> int:
        path = self.folder / f"{name}.step"
        return int(path.read_text() or 0) if path.exists() else 0

    def wait_for_step(self, name: str, step: int) -> None:
        wait_until(lambda: self.step(name) >= step, f"{name} at {step}")

    def result(self, name: str) -> dict[str, Any]:
        return dict(json.loads((self.folder / f"{name}.json").read_text()))


def wait_until(is_true: Any, what: str, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    never = threading.Event()
    while not is_true():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        never.wait(0.02)
