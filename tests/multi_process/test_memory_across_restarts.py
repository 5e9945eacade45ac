"""A share that was too large for a device's memory becomes a bound when training starts again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def test_a_share_that_ran_out_of_memory_is_not_tried_again(
    start_workers: Any, tmp_path: Path
) -> None:
    arguments = [tmp_path / "memory", 1, 6, tmp_path / "shares.json"]
    first = start_workers("program_memory.py", {"worker": 2}, arguments)
    survivor, failed = first.wait()
    assert failed.exit_code == 1
    assert "Out of memory on replica(s) [1]" in failed.output
    assert "max_share={1: 5}" in failed.output  # half of 10, as nothing smaller was computed yet
    assert survivor.exit_code == 1
    assert "WorkerLostError" in survivor.output
    second = start_workers("program_memory.py", {"worker": 2}, arguments)
    for worker in second.wait():
        assert worker.exit_code == 0, worker.output
    shares = json.loads((tmp_path / "shares.json").read_text())
    assert len(shares) == 10
    assert all(share[1] <= 5 for share in shares), shares
