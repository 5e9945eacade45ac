"""Workers that start again, in another order, in another number, know each other's speeds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from forked_workers import cluster_environments

from keras_het.launch.local.worker_environment import Emulation

SPEEDS = {"a": 4.0, "b": 1.0, "c": 2.0}


def train(start: Any, folder: Path, machines: Sequence[str], fails_at: int = 0) -> list[Any]:
    """Train on machines, each a worker; return the plans of each."""
    emulation = Emulation(tuple(SPEEDS[name] for name in machines), seconds_per_sample=0.002)
    environments = [
        {**environment, **emulation.environment_of(index), "NAME_OF_MACHINE": machines[index]}
        for index, environment in enumerate(cluster_environments({"worker": len(machines)}))
    ]
    arguments = [folder, fails_at]
    workers = start("program_balance_again.py", arguments=arguments, environments=environments)
    for worker in workers.wait():
        assert worker.exit_code == bool(fails_at), worker.output
        assert not fails_at or "the power went out" in worker.output
    return [json.loads((folder / f"{name}.json").read_text())["plans"] for name in machines]


@pytest.mark.full
def test_machines_in_another_order_and_one_less_keep_their_speeds(
    start_workers: Any, tmp_path: Path
) -> None:
    before = train(start_workers, tmp_path, "abc", fails_at=12)[0][-1]["shares"]
    assert before[0] > before[2] > before[1]
    plans = train(start_workers, tmp_path, "cab", fails_at=16)
    expected = [before[2], before[0], before[1]]
    assert [each[0]["shares"] for each in plans] == [expected] * 3
    plans = train(start_workers, tmp_path, "ba")
    first = plans[0][0]
    assert [each[0]["shares"] for each in plans] == [first["shares"]] * 2
    assert first["reason"] == "known device times"
    # speeds 1:4 of 40 samples
    assert abs(first["shares"][0] - 8) <= 3
