"""On devices that work ahead of their hosts, hosts read only in the steps that need it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from addresses import free_address
from forked_workers import cluster_environments
from hybrid_clusters import SECRET

from keras_het.launch.local.worker_environment import Emulation

PERIOD = 5

pytestmark = pytest.mark.full


def read_steps(
    start_workers: Any,
    folder: Path,
    jobs: dict[str, int],
    seconds_per_sample: float = 0.002,
    **way: Any,
) -> Any:
    """Train; of each task, where it reads by the number of a plain step, and all steps."""
    emulation = Emulation((1.0,), seconds_per_sample, asynchronous=True)
    common = {**SECRET, "KERAS_HET_SERVICE_ADDRESS": free_address()}
    environments = [
        {**environment, **emulation.environment_of(0)}
        for environment in cluster_environments(jobs, common)
    ]
    arguments = [folder, json.dumps(way)]
    started = start_workers("program_reads.py", arguments=arguments, environments=environments)
    for worker in started.wait():
        assert worker.exit_code == 0, worker.output
    reports = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    assert len(reports) == sum(jobs.values())
    return [({int(n): where for n, where in r["reads"].items()}, r["steps"]) for r in reports]


def test_local_training_reads_where_it_exchanges(start_workers: Any, tmp_path: Path) -> None:
    options = {"rule": "diloco", "period": PERIOD}
    jobs, way = {"worker": 2}, {"callback": "LocalTraining", "options": options}
    for reads, steps in read_steps(start_workers, tmp_path, jobs, **way):
        assert list(reads) == list(range(PERIOD - 1, steps, PERIOD)), reads


def test_local_training_that_overlaps_reads_where_it_sends_and_receives(
    start_workers: Any, tmp_path: Path
) -> None:
    config = {"period": PERIOD, "overlap": 2}
    options = {"rule": {"class_name": "diloco", "config": config}}
    jobs, way = {"worker": 2}, {"callback": "LocalTraining", "options": options}
    for reads, steps in read_steps(start_workers, tmp_path, jobs, **way):
        sent = range(PERIOD - 1, steps, PERIOD)
        received = range(PERIOD + 1, steps, PERIOD)
        assert list(reads) == sorted([*sent, *received]), reads


def test_a_sync_group_reads_where_it_exchanges(start_workers: Any, tmp_path: Path) -> None:
    options = {"rule": "delta", "period": PERIOD, "timeout_seconds": 60}
    jobs, way = {"worker": 2, "async": 1}, {"callback": "AsyncWorkers", "options": options}
    # slow enough that the async worker gets its part, however late it starts
    found = read_steps(start_workers, tmp_path, jobs, seconds_per_sample=0.04, **way)
    (reads, steps), *group = found
    # the first step is traced; an answer is taken in the step in which it comes, too
    assert steps and len(reads.keys() - {0}) <= 2 * (steps // PERIOD), reads
    for reads, steps in group:
        assert list(reads) == list(range(PERIOD - 1, steps, PERIOD)), reads


def test_summation_reads_in_each_step(start_workers: Any, tmp_path: Path) -> None:
    """Gradients go through the host, in the step's graph: nothing else is read."""
    way = {"strategy": {"gradient_reduction": "summation"}}
    for reads, _ in read_steps(start_workers, tmp_path, {"worker": 2}, **way):
        assert not reads


def test_only_summation_copies_gradients_to_the_host(start_workers: Any, tmp_path: Path) -> None:
    ways: dict[str, Any] = {
        "plain": {},
        "in parts": {"micro_batch_size": 2},
        "16 bits": {"communication_dtype": "bfloat16"},
        "low rank": {"powersgd_rank": 1},
        "summation": {"gradient_reduction": "summation"},
    }
    environments = cluster_environments({"worker": 2}, SECRET)
    arguments = [tmp_path, json.dumps(ways)]
    started = start_workers("program_copies.py", arguments=arguments, environments=environments)
    for worker in started.wait():
        assert worker.exit_code == 0, worker.output
    for path in sorted(tmp_path.glob("*.json")):
        copied = json.loads(path.read_text())
        assert len(copied.pop("summation")) == 1, "all gradients, and what is logged, in one buffer"
        assert not any(copied.values()), copied
    assert len(list(tmp_path.glob("*.json"))) == 2
