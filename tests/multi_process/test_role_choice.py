"""Roles that are chosen from what the first steps measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keras_het.launch import LocalCluster
from keras_het.launch.local.worker_environment import Emulation
from keras_het.strategy.cluster.cluster_config import read_cluster_config

EPOCHS = 20  # of the program
PROGRAM = Path(__file__).parent / "program_roles.py"


def run(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    speeds: tuple[float, ...],
    rates: tuple[float, ...] | list[float] = (),
) -> dict[str, dict[str, Any]]:
    monkeypatch.setenv("KERAS_HET_SECRET", "a secret that only tests know")
    lines: list[str] = []
    emulation = Emulation(speeds, seconds_per_sample=0.01)
    cluster = LocalCluster(
        [sys.executable, str(PROGRAM), str(folder), json.dumps(list(rates))],
        len(speeds),
        emulation=emulation,
        on_line=lambda worker, stream, line: lines.append(f"{worker}: {line.text}"),
    )
    with cluster:
        cluster.wait(timeout=240)
    assert not cluster.failures, "\n".join(lines[-60:])
    found = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    found["output"] = {"lines": lines}
    return found


@pytest.mark.full
def test_an_even_cluster_stays_synchronous(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = run(tmp_path, monkeypatch, (1.0, 1.0))
    output = results.pop("output")["lines"]
    assert sorted(results) == ["worker_0", "worker_1"]
    assert all(
        result["chosen"] == "" and len(result["loss"]) == EPOCHS for result in results.values()
    )
    assert any("Measured for roles: balanced" in line for line in output)


@pytest.mark.full
def test_a_worker_behind_a_slow_link_gets_another_role(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the link is as fast as the others; a rate of 200 bytes per second stands in for the measured
    results = run(tmp_path, monkeypatch, (8.0, 8.0, 4.0), rates=[1e8, 1e8, 200.0])
    output = results.pop("output")["lines"]
    plan = next(line for line in output if "Measured for roles:" in line)
    assert "sync group 0, 1;" in plan or "sync group 0-1;" in plan, plan
    assert "balanced" in plan and "leave_out" in plan and "hybrid" in plan
    leader = results["worker_0"]
    assert len(leader["cluster"]["worker"]) == 2 and leader["chosen"]
    assert len(leader["loss"]) == EPOCHS and np.isfinite(leader["loss"]).all()
    is_hybrid = "async" in leader["cluster"]
    assert ("async_0" in results) == is_hybrid
    assert is_hybrid or any("left out" in line for line in output)


def test_environment_in_the_new_roles() -> None:
    others = {"evaluator": ["e:1"], "summation": ["s:1", "t:1"]}
    cluster = {"chief": ["a:1"], "worker": ["b:1", "c:1", "d:1"], **others}
    roles = ("sync", "async", "sync", "out")
    expected = {"worker": ["a:1", "c:1"], "async": ["b:1"], **others}
    tasks = {
        ("chief", 0): ("worker", 0),
        ("worker", 0): ("async", 0),
        ("worker", 1): ("worker", 1),
        ("worker", 2): None,
    }
    for (job, index), new in tasks.items():
        text = json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})
        from keras_het.asynchronous.exchange.role_choice import environment_of

        config = read_cluster_config({"TF_CONFIG": text})
        assert config is not None
        environment = environment_of(config, roles)
        if new is None:
            assert environment is None
            continue
        assert environment is not None
        changed = json.loads(environment["TF_CONFIG"])
        assert changed == {"cluster": expected, "task": {"type": new[0], "index": new[1]}}
