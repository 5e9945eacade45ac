"""The link of an async worker stalls: cable out and in again, in network namespaces."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from _namespaces import limited_hosts, why_not
from hybrid_clusters import MANY, SAMPLES, SECRET, assert_equal_weights, sample_counts, wait_until

from keras_het.launch.local.emulation import Emulation

PROGRAM = Path(__file__).parent / "program_hybrid.py"
PORT, SERVICE_PORT = 7100, 7101

pytestmark = pytest.mark.network_namespaces


@pytest.fixture(scope="module")
def hosts() -> Iterator[Any]:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with limited_hosts([1000.0, 1000.0]) as made:
        yield made


class Task:
    """One task of the cluster on its host; killed at the end of the test."""

    def __init__(self, hosts: Any, index: int, name: str, folder: Path, **options: Any) -> None:
        job = name.partition("_")[0]
        cluster = {
            job: [f"{hosts.address(at)}:{PORT}"] for at, job in enumerate(("worker", "async"))
        }
        config = {"cluster": cluster, "task": {"type": job, "index": 0}}
        self._steps = folder / f"{name}.step"
        self._result = folder / f"{name}.json"
        self._log = folder / f"{name}.log"
        arguments = [sys.executable, str(PROGRAM), str(folder)]
        arguments.append(json.dumps({"epochs": MANY, "period": 2, **options}))
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                hosts.command(index, arguments),
                stdout=log,
                stderr=log,
                env={
                    **os.environ,
                    **SECRET,
                    **Emulation((1.0,), seconds_per_sample=0.008).environment_of(0),
                    "KERAS_HET_SERVICE_ADDRESS": f"{hosts.address(0)}:{SERVICE_PORT}",
                    "TF_CONFIG": json.dumps(config),
                },
            )

    def step(self) -> int:
        return int(self._steps.read_text() or 0) if self._steps.exists() else 0

    def wait_for_step(self, step: int) -> None:
        wait_until(lambda: self.step() >= step or self.process.poll() is not None, f"step {step}")
        assert self.process.poll() is None, self.output()

    def output(self) -> str:
        return self._log.read_text()

    def result(self) -> dict[str, Any]:
        assert self.process.wait(200) == 0, self.output()
        return dict(json.loads(self._result.read_text()))


@pytest.fixture
def tasks(hosts: Any, tmp_path: Path) -> Iterator[Any]:
    started: list[Task] = []

    def start(**options: Any) -> list[Task]:
        for index, name in enumerate(("worker_0", "async_0")):
            started.append(Task(hosts, index, name, tmp_path, **options))
        return started

    yield start
    hosts.set_link(1, up=True)
    for task in started:
        task.process.kill()
        task.process.wait(20)


@pytest.mark.full
def test_nothing_is_lost_when_the_link_stalls_for_less_than_the_timeout(
    hosts: Any, tasks: Any
) -> None:
    group, worker = tasks(timeout_seconds=100)
    worker.wait_for_step(3)
    hosts.set_link(1, up=False)
    group.wait_for_step(group.step() + 40)  # waits for nobody
    hosts.set_link(1, up=True)
    results = {"worker_0": group.result(), "async_0": worker.result()}
    assert_equal_weights(results)
    assert sample_counts(results).tolist() == [MANY] * SAMPLES


@pytest.mark.full
def test_a_worker_whose_link_stalls_for_longer_goes_on_alone_and_comes_back(
    hosts: Any, tasks: Any
) -> None:
    group, worker = tasks(timeout_seconds=2, on_service_loss="continue")
    worker.wait_for_step(3)
    hosts.set_link(1, up=False)
    wait_until(lambda: "goes on alone" in worker.output(), "the loss to be noticed")
    group.wait_for_step(group.step() + 10)
    hosts.set_link(1, up=True)
    results = {"worker_0": group.result(), "async_0": worker.result()}
    assert "answers again" in worker.output()
    assert_equal_weights(results)
    counts = sample_counts(results)
    assert counts.min() >= MANY - 1  # a batch that was handed out with an answer that was lost
    assert counts.mean() < 2 * MANY


@pytest.mark.alone
@pytest.mark.parametrize("cut", [0, 1])
def test_a_link_that_is_cut_one_way_ends_both_sides_in_time(
    hosts: Any, tmp_path: Path, cut: int
) -> None:
    cluster = {"worker": [f"{hosts.address(index)}:{PORT + 2 + cut}" for index in range(2)]}
    program = Path(__file__).with_name("program_fit.py")
    logs = [tmp_path / f"{index}.log" for index in range(2)]
    processes = []
    try:
        for index, log in enumerate(logs):
            task = {"type": "worker", "index": index}
            with log.open("w") as file:
                arguments = [sys.executable, str(program), json.dumps({"steps": 10_000_000})]
                environment = {
                    **os.environ,
                    "TF_CONFIG": json.dumps({"cluster": cluster, "task": task}),
                    "KERAS_HET_PEER_TIMEOUT_SECONDS": "12",
                }
                processes.append(
                    subprocess.Popen(
                        hosts.command(index, arguments), stdout=file, stderr=file, env=environment
                    )
                )

        def all_say(text: str) -> bool:
            assert all(process.poll() in (None, 1) for process in processes)
            return all(text in log.read_text() for log in logs)

        wait_until(lambda: all_say("training"), "training", 200)
        # from now on what this host sends goes to nobody, and it still hears the other one
        deaf = [hosts.address(1 - cut), "lladdr", "02:00:00:00:00:99", "dev", "eth0"]
        neighbour = ["ip", "-n", hosts.names[cut], "neigh", "replace", *deaf, "nud", "permanent"]
        subprocess.run(neighbour, check=True, timeout=20)
        since = time.monotonic()
        wait_until(lambda: all_say("raised WorkerLostError"), "both sides to find out")
        assert time.monotonic() - since < 18  # a requirement of the product
    finally:
        for process in processes:
            process.kill()
            process.wait(20)
        hosts_again = ["ip", "-n", hosts.names[cut], "neigh", "flush", "dev", "eth0"]
        subprocess.run(hosts_again, check=False, timeout=20)
