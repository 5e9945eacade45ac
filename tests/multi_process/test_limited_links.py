"""Links of hosts in network namespaces: of limited rates, pulled out and in again, cut one way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from _namespaces import limited_hosts, why_not
from hybrid_clusters import MANY, SECRET, assert_equal_weights, assert_shared, sample_counts
from hybrid_clusters import wait_until as wait_until_true

from keras_het.launch.local.worker_environment import Emulation

FOLDER = Path(__file__).parent
PORT, SERVICE_PORT = 7100, 7101
MBIT = (1000.0, 16.0, 4.0)  # of the leader and two workers
SLOW = Emulation((1.0,), seconds_per_sample=0.008).environment_of(0)

pytestmark = pytest.mark.network_namespaces


class Task:
    """One task of a cluster, on the host of the same number."""

    def __init__(
        self, hosts: Any, index: int, jobs: list[str], command: list[str], folder: Path, **more: str
    ) -> None:
        cluster: dict[str, list[str]] = {job: [] for job in jobs}
        for at, job in enumerate(jobs):
            cluster[job].append(f"{hosts.address(at)}:{PORT}")
        job, place = jobs[index], jobs[:index].count(jobs[index])
        self._files = folder / f"{job}_{place}"
        environment = {
            **os.environ,
            **SECRET,
            "KERAS_HET_SERVICE_ADDRESS": f"{hosts.address(0)}:{SERVICE_PORT}",
            "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": job, "index": place}}),
            **more,
        }
        with self._files.with_suffix(".log").open("w") as log:
            self.process = subprocess.Popen(
                hosts.command(index, [sys.executable, *command]),
                stdout=log,
                stderr=log,
                env=environment,
            )

    def step(self) -> int:
        path = self._files.with_suffix(".step")
        return int(path.read_text() or 0) if path.exists() else 0

    def wait_for_step(self, step: int) -> None:
        self.wait_until(lambda: self.step() >= step, f"step {step}")

    def wait_until(self, is_true: Callable[[], bool], what: str) -> None:
        """Waits for a condition while the task lives."""
        wait_until_true(lambda: is_true() or self.process.poll() is not None, what, 200)
        assert is_true(), self.output()

    def output(self) -> str:
        return self._files.with_suffix(".log").read_text()

    def result(self) -> Any:
        """What the task wrote at its end."""
        assert self.process.wait(200) == 0, self.output()
        return json.loads(self._files.with_suffix(".json").read_text())


@pytest.fixture
def hosts(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Two hosts, or as many as a test gives rates for."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with limited_hosts(getattr(request, "param", [1000.0, 1000.0])) as made:
        yield made


@pytest.fixture
def start(hosts: Any, tmp_path: Path) -> Iterator[Callable[..., list[Task]]]:
    """Starts a task on each host; they are killed at the end of the test."""
    started: list[Task] = []

    def run(jobs: list[str], program: str, *arguments: object, **more: str) -> list[Task]:
        command = [str(FOLDER / program), *map(str, arguments)]
        for index in range(len(jobs)):
            started.append(Task(hosts, index, jobs, command, tmp_path, **more))
        return started

    yield run
    for task in started:
        task.process.kill()
        task.process.wait(20)


@pytest.fixture
def start_hybrid(start: Any, tmp_path: Path) -> Callable[..., list[Task]]:
    def run(**options: Any) -> list[Task]:
        text = json.dumps({"epochs": MANY, "period": 2, **options})
        tasks: list[Task] = start(["worker", "async"], "program_hybrid.py", tmp_path, text, **SLOW)
        return tasks

    return run


@pytest.mark.full
@pytest.mark.parametrize("hosts", [MBIT], indirect=True)
def test_rates_of_limited_links(start: Any, tmp_path: Path) -> None:
    tasks = start(["worker"] * len(MBIT), "program_link_rates.py", tmp_path)
    told = [task.result() for task in tasks]
    assert told[0] == told[1] == told[2]
    leader, *rates = told[0]
    assert leader == max(rates)  # its own link is not measured
    for rate, mbit in zip(rates, MBIT[1:], strict=True):
        # a token bucket lets no more through, but for its burst; headers and a busy machine cost
        assert 0.5 * mbit < rate * 8 / 1e6 < 1.1 * mbit


@pytest.mark.full
def test_nothing_is_lost_when_the_link_stalls_for_less_than_the_timeout(
    hosts: Any, start_hybrid: Any
) -> None:
    group, worker = start_hybrid(timeout_seconds=100)
    worker.wait_for_step(3)
    hosts.set_link(1, up=False)
    group.wait_for_step(group.step() + 40)  # waits for nobody
    hosts.set_link(1, up=True)
    assert_shared({"worker_0": group.result(), "async_0": worker.result()}, MANY)


@pytest.mark.full
def test_a_worker_whose_link_stalls_for_longer_continues_alone_and_comes_back(
    hosts: Any, start_hybrid: Any
) -> None:
    group, worker = start_hybrid(timeout_seconds=2, on_service_loss="continue")
    worker.wait_for_step(3)
    hosts.set_link(1, up=False)
    worker.wait_until(lambda: "continues alone" in worker.output(), "the loss to be noticed")
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
    hosts: Any, start: Any, cut: int
) -> None:
    options = json.dumps({"steps": 10_000_000})
    patience = {"KERAS_HET_PEER_TIMEOUT_SECONDS": "12"}
    tasks = start(["worker", "worker"], "program_fit.py", options, **patience)
    for task in tasks:
        task.wait_until(lambda task=task: "training" in task.output(), "training")
    # from now on what this host sends goes to nobody, and it still hears the other one
    deaf = [hosts.address(1 - cut), "lladdr", "02:00:00:00:00:99", "dev", "eth0"]
    neighbour = ["ip", "-n", hosts.names[cut], "neigh", "replace", *deaf, "nud", "permanent"]
    subprocess.run(neighbour, check=True, timeout=20)
    since = time.monotonic()
    for task in tasks:
        task.wait_until(lambda task=task: "raised WorkerLostError" in task.output(), "the loss")
    assert time.monotonic() - since < 18  # a requirement of the product
