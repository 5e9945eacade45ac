"""What users do wrong when they start a cluster, and what they are told."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest
from forked_workers import cluster_environments

STEPS = 25


def _fit(
    start_workers: Any, jobs: dict[str, int] | None = None, environments: Any = None, **options: Any
) -> Any:
    arguments = [json.dumps({"steps": STEPS, **options})]
    return start_workers("program_fit.py", jobs, arguments, environments)


def test_different_shares_are_an_error_on_every_worker(start_workers: Any) -> None:
    workers = _fit(start_workers, {"worker": 3}, shares=["4:2:1", "4:2:1", "1:2:4"])
    for result in workers.wait():
        assert result.exit_code == 1
        assert "ValueError: The workers were started with different settings: share weights" in (
            result.output
        )
        assert "Start all workers with the same script" in result.output


@pytest.mark.full
def test_different_orders_are_an_error_on_every_worker(start_workers: Any) -> None:
    workers = _fit(start_workers, {"worker": 3}, seed=[1, 2, 1])
    for result in workers.wait():
        assert result.exit_code == 1
        assert "ValueError: The workers read the samples in different orders" in result.output
        assert "on the chief and worker 2, hash" in result.output
        assert "on worker 1. Give every worker" in result.output
        assert "keras.utils.set_random_seed(42)" in result.output


def test_tensorflow_used_before_the_strategy(start_workers: Any) -> None:
    workers = _fit(start_workers, {"worker": 2}, use_tensorflow_first=True)
    for result in workers.wait():
        assert result.exit_code == 1
        assert "RuntimeError" in result.output
        assert "HeterogeneousStrategy" in result.output.splitlines()[-1] or (
            "must be set" in result.output or "program startup" in result.output
        )


def test_a_malformed_tf_config_is_one_error(start_workers: Any) -> None:
    cluster = {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}
    text = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 2}})
    (result,) = _fit(start_workers, environments=[{"TF_CONFIG": text}]).wait()
    assert result.exit_code == 1
    last = result.output.splitlines()[-1]
    assert last.startswith("ValueError: TF_CONFIG's task index is out of range")


@pytest.mark.full
def test_port_is_taken(start_workers: Any) -> None:
    environments = cluster_environments({"worker": 2})
    address = json.loads(environments[0]["TF_CONFIG"])["cluster"]["worker"][0]
    with socket.socket() as taken:
        taken.bind((address.split(":")[0], int(address.split(":")[1])))
        taken.listen()
        result = _fit(start_workers, environments=environments).wait_for(0)
    assert result.exit_code != 0
    # TensorFlow 2.16 does not say which address.
    assert address.split(":")[1] in result.output or "Could not start gRPC" in result.output


def test_an_evaluator_trains_with_nobody(start_workers: Any) -> None:
    cluster = {"worker": ["127.0.0.1:1", "127.0.0.1:2"], "evaluator": ["127.0.0.1:3"]}
    task = {"type": "evaluator", "index": 0}
    text = json.dumps({"cluster": cluster, "task": task})
    (result,) = _fit(start_workers, environments=[{"TF_CONFIG": text}]).wait()
    assert result.exit_code == 0, result.output
    assert "strategy of 1 worker(s)" in result.output
    assert "finished" in result.output
