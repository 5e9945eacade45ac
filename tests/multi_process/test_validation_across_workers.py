"""Wrong data of one worker stops all; what two workers consumed is compared on both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from forked_workers import cluster_environments

pytest.importorskip(
    "tensorflow_data_validation", reason="needs TFDV: `make test-validation` runs this"
)


def test_workers_agree(start_workers: Any, tmp_path: Path) -> None:
    from keras_het.loader.validation import read_statistics

    environments = cluster_environments({"worker": 2})
    workers = start_workers(
        "program_validation.py", arguments=[tmp_path], environments=environments
    )
    for worker in workers.wait():
        assert worker.exit_code == 0, worker.output
    first, second = (json.loads((tmp_path / f"worker_{i}.json").read_text()) for i in (0, 1))

    assert (
        "on worker(s) [1]" in first["error"] and "This worker's samples are right" in first["error"]
    )
    assert "on worker(s) [1]" in second["error"] and "x: " in second["error"]
    assert (first["anomalies"], second["anomalies"]) == ([], ["x"])
    assert first["before"] == first["after"] == second["after"] == second["before"]

    assert first["trained"] == second["trained"] != first["after"]
    assert first["distances"] == second["distances"]
    assert len(first["distances"]) == 2
    # Of the labels 0 0 0 1 1 2 | 2 3 of each batch worker 0 gets the first six.
    shard, reference, feature, value = first["distances"][0][0]
    assert (shard, reference, feature) == ("replica 1", "replica 0", "label")
    assert value == pytest.approx(0.5, abs=1e-6)
    assert not (tmp_path / "written_by_1").exists(), "only the chief writes"
    for epoch in (1, 2):
        for replica, rows in ((0, 60), (1, 20)):
            path = tmp_path / "written_by_0" / f"epoch-000{epoch}-replica-{replica}.stats"
            assert read_statistics(path).datasets[0].num_examples == rows
