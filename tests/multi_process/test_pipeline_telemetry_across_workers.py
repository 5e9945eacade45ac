"""Telemetry of a pipeline over two processes: all know the passes of all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.full
def test_the_passes_of_all_processes_are_known_to_all(start_workers: Any, tmp_path: Path) -> None:
    workers = start_workers("program_pipeline_telemetry.py", {"worker": 2}, [tmp_path])
    for worker in workers.wait():
        assert worker.exit_code == 0, worker.output
    found = [json.loads((tmp_path / f"worker_{i}.json").read_text()) for i in range(2)]
    assert found[0] == found[1]
    assert found[0]["same"]
    assert found[0]["devices"] == ["worker 0 CPU 0", "worker 1 CPU 0"]
    assert found[0]["steps"] == list(range(11))
    assert found[0]["shares"] == [[20, 12]] * 11
    assert found[0]["least"] > 0
    expected = [
        [*((kind, 0, m) for kind in ("forward", "backward") for m in range(4))],
        [*((kind, 1, m) for kind in ("forward", "backward") for m in (0, 1, 3))],
    ]
    expected[0] += [("forward", 1, 2), ("backward", 1, 2)]
    passes = [sorted(map(tuple, of_device)) for of_device in found[0]["passes"]]
    assert passes == [sorted(of_device) for of_device in expected]
    from keras_het.telemetry.event_files import read_log  # imports TensorFlow

    (run,) = read_log(tmp_path / "log")  # the chief's
    record = run.recording.pipeline
    assert record is not None
    assert [stage.devices for stage in record.stages] == [(0,), (1, 0)]
    assert run.content.passes[-1][0] == 10
    for busy, compute in zip(found[0]["busy"], found[0]["compute"], strict=True):
        assert compute == pytest.approx(busy, rel=1e-5)
