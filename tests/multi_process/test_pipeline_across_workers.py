"""A model in stages on several processes trains as on one device, on every worker.

Each cluster runs all its checks in one go, beside a process with one device; the tests compare what
they have written.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import Written

QUICK = ("masked/replicas",)
CHECKS = (
    *QUICK,
    "convnet/three stages",
    "masked/three stages",
    "masked/data parallelism",
    "masked/idle chief",
    "masked/recomputed",
    "convnet/replicas",
    "convnet/idle worker",
    "convnet/measured",
    "several/three stages",
    "several/replicas",
    "several/idle worker",
    "masked_outputs/three stages",
    "masked_outputs/replicas",
    "own_loss/three stages",
    "own_loss/replicas",
    "own_loss/data parallelism",
    "own_loss/measured",
)
TRAININGS = (
    "accumulation/three stages",
    "accumulation/replicas",
    "averages/head",
    "overflow/head",
    "overflow/replicas",
    "half/three stages",
    "callbacks/three stages",
    "normalizing/three stages",
    "normalizing/replicas",
    "again/three stages",
    "again/replicas",
)
TOLERANCES = {"half": 5e-3, "overflow": 1e-4}
LONGEST_SECONDS = 540.0
# The first test of a cluster waits for all its checks.
pytestmark = pytest.mark.timeout(600)


class Pipelines(Written):
    """What the workers and one device have written."""

    def __init__(
        self, start: Any, folder: Path, checks: tuple[str, ...], num_workers: int = 2
    ) -> None:
        self._num_workers = num_workers
        processes = [
            (start("program_pipeline.py", jobs, [folder, *checks]), number)
            for jobs, number in ((None, 1), ({"worker": num_workers}, num_workers))
        ]
        super().__init__(folder, processes, LONGEST_SECONDS)

    def assert_as_one_device(self, check: str) -> None:
        """Fails unless every worker has what one device has."""
        model, _, _ = check.partition("/")
        expected, tolerance = self.load(model, "single"), TOLERANCES.get(model, 1e-9)
        for worker in range(self._num_workers):
            found = self.load(check, f"worker_{worker}")
            names = {name for name in expected if worker == 0 or not name.startswith("saved")}
            assert found.keys() == names
            for name in sorted(names):
                np.testing.assert_allclose(
                    found[name],
                    expected[name],
                    rtol=tolerance,
                    atol=tolerance,
                    err_msg=f"{name} of worker {worker}",
                )


@pytest.fixture(scope="module")
def written(
    start_for_session: Any, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Pipelines:
    checks = QUICK if pytestconfig.getoption("--quick") else CHECKS
    return Pipelines(start_for_session, tmp_path_factory.mktemp("pipeline"), checks)


@pytest.mark.quick(*QUICK)
@pytest.mark.parametrize("check", CHECKS)
def test_every_worker_has_what_one_device_has(written: Pipelines, check: str) -> None:
    written.assert_as_one_device(check)


@pytest.fixture(scope="module")
def written_of_trainings(
    start_for_session: Any, tmp_path_factory: pytest.TempPathFactory
) -> Pipelines:
    return Pipelines(start_for_session, tmp_path_factory.mktemp("trainings"), TRAININGS)


@pytest.mark.full
@pytest.mark.parametrize("check", TRAININGS)
def test_trainings_of_other_kinds(written_of_trainings: Pipelines, check: str) -> None:
    written_of_trainings.assert_as_one_device(check)


@pytest.mark.full
def test_stages_on_some_of_three_workers(start_workers: Any, tmp_path: Path) -> None:
    checks = "masked/three workers", "averages/three workers"
    written = Pipelines(start_workers, tmp_path, checks, 3)
    for check in checks:
        written.assert_as_one_device(check)


@pytest.mark.full
def test_all_processes_know_all_passes(start_workers: Any, tmp_path: Path) -> None:
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
    from keras_het.telemetry.event_log import read_log  # imports TensorFlow

    (run,) = read_log(tmp_path / "log")  # the chief's
    record = run.recording.pipeline
    assert record is not None
    assert [stage.devices for stage in record.stages] == [(0,), (1, 0)]
    assert run.content.passes[-1][0] == 10
    for busy, compute in zip(found[0]["busy"], found[0]["compute"], strict=True):
        assert compute == pytest.approx(busy, rel=1e-5)
