"""An adaptive global batch grows on all workers after the same step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from forked_workers import cluster_environments

from keras_het.fit.backup_folder import BackupFolder


def test_workers_agree(start_workers: Any, tmp_path: Path) -> None:
    environments = cluster_environments({"worker": 2})
    workers = start_workers("program_growth.py", arguments=[tmp_path], environments=environments)
    for worker in workers.wait():
        assert worker.exit_code == 0, worker.output
    first, second = (json.loads((tmp_path / f"worker_{i}.json").read_text()) for i in (0, 1))
    assert first == second
    assert sum(first["steps"]) == 4 * 480
    assert first["sizes"][0] == 12 and first["sizes"][-1] > 12
    assert first["sizes"] == sorted(first["sizes"])
    backup = BackupFolder(tmp_path / "backup", 1)
    assert backup.find()
    position = json.loads(str(backup.state()["position"]))
    assert position["global_batch_size"] == first["sizes"][-1]
