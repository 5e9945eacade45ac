"""Callbacks on two workers: the same decisions everywhere, and only the chief writes files.

With LoaderTuner each worker changes its own data path, and both keep the one order.
"""

from __future__ import annotations

import csv
import platform
from typing import Any

import numpy as np
import pytest
from recorded import LOADER_EPOCHS, LOADER_ROWS, ONLY_WORKERS, OWN
from runs import Runs

QUICK = ("files", "telemetry")
CHECKS = ("decisions", "buckets", *QUICK)
# without a counterpart on one device; it stays local for the rest of the process
LAST = "telemetry_of_local_training"
MOST_EPOCHS = 12
LOADER_CHECKS = ("own_rows", "whole_batches")

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def runs(
    start_for_session: Any, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Runs:
    folder = tmp_path_factory.mktemp("callbacks")
    checks = QUICK if pytestconfig.getoption("--quick") else (*CHECKS, LAST)
    return Runs(start_for_session, folder, "callback_checks", checks, {"worker": 2}, "1,1")


@pytest.mark.quick(*QUICK)
@pytest.mark.parametrize("check", CHECKS)
def test_two_workers_equal_one_device(runs: Runs, check: str) -> None:
    runs.assert_as_one_device(check)


@pytest.mark.full
def test_all_workers_stop_together_before_the_end(runs: Runs) -> None:
    for results in runs.of_workers("decisions"):
        rates = results["rates"]
        assert len(results["history/loss"]) == len(rates)
        assert len(rates) < MOST_EPOCHS, "nothing was decided: the test would be empty"
        assert rates[-1] < rates[0]


@pytest.mark.full
def test_bucket_sizes_are_the_chiefs_choice(runs: Runs) -> None:
    for results in runs.of_workers("buckets"):
        assert results[f"{ONLY_WORKERS}chosen"] == 4096
        assert results[f"{ONLY_WORKERS}seconds/1"] == 1.0  # of the same clock on both


def test_the_chief_writes_all_files(runs: Runs) -> None:
    folder = runs.workers.folders[0]
    names = {path.name for path in folder.iterdir()}
    assert names == {
        "every-1.keras",
        "every-2.keras",
        "best.weights.h5",
        "log.csv",
        "tensorboard",
        "telemetry",
        "backup",
        "het_backup",
        "final.keras",
        "final.weights.h5",
    }
    assert {path.name for path in (folder / "tensorboard").iterdir()} == {"train", "validation"}
    with (folder / "log.csv").open() as log:
        rows = list(csv.DictReader(log))
    chief, _ = runs.of_workers("files")
    np.testing.assert_allclose(
        [float(row["loss"]) for row in rows], chief["history/loss"], rtol=1e-6
    )


def test_telemetry_knows_all_devices(runs: Runs) -> None:
    for results in runs.of_workers("telemetry"):
        assert list(results[f"{OWN}names"]) == ["worker 0 CPU 0", "worker 1 CPU 0"]
        assert set(results[f"{OWN}hosts"]) == {"127.0.0.1"}
        own = f"{platform.node()} CPU:0"  # of a host's processes that of the second one is another
        assert list(results[f"{OWN}identities"]) == [own, f"{own} #2"]
        assert all(results[f"{OWN}models"]) and results[f"{OWN}in_history"]
        # six steps, of which the last is known to none
        assert results[f"{ONLY_WORKERS}steps"].tolist() == [0, 1, 2, 3, 4]
        assert results[f"{ONLY_WORKERS}shares"].tolist() == [[5, 3], [5, 3], [4, 2], [5, 3], [5, 3]]
        assert (results[f"{ONLY_WORKERS}compute"] > 0).all()


@pytest.mark.full
def test_telemetry_completes_the_times_of_local_training(runs: Runs) -> None:
    for results in runs.of_workers(LAST):
        steps = results[f"{OWN}steps"].tolist()
        assert steps == [0, 1, 2, 3, 4]
        # as the workers told each other at the end of each epoch
        assert (results[f"{OWN}compute"][[0, 1, 2, 3]] > 0).all()
        assert results[f"{OWN}shares"].shape == (5, 2)
        assert results[f"{OWN}in_history"]


def test_the_other_worker_writes_nothing(runs: Runs) -> None:
    assert list(runs.workers.folders[1].rglob("*")) == []


def test_the_saved_model_has_the_trained_weights(runs: Runs) -> None:
    chief, _ = runs.of_workers("files")
    differences = [value for name, value in chief.items() if name.startswith(OWN + "difference")]
    assert len(differences) == 4
    assert max(differences) == 0


def test_the_other_worker_says_once_what_does_nothing(runs: Runs) -> None:
    """`save` and `save_weights`, called by the script; not what ModelCheckpoint calls."""
    chief, other = runs.of_workers("files")
    assert (chief[OWN + "nothing_done"], other[OWN + "nothing_done"]) == (0, 2)


@pytest.fixture(scope="module")
def loader_runs(start_for_session: Any, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("loader")
    return Runs(start_for_session, folder, "loader_checks", LOADER_CHECKS, {"worker": 2}, "1,1")


@pytest.mark.full
@pytest.mark.parametrize("check", LOADER_CHECKS)
def test_two_workers_that_move_equal_one_device(loader_runs: Runs, check: str) -> None:
    loader_runs.assert_as_one_device(check)


@pytest.mark.full
@pytest.mark.parametrize("check", LOADER_CHECKS)
def test_each_worker_moves(loader_runs: Runs, check: str) -> None:
    for results in loader_runs.of_workers(check):
        assert results[f"{OWN}reason"] == "None"
        assert len(results[f"{OWN}moves"]) >= 3
        assert results[f"{OWN}moves"].all()


@pytest.mark.full
def test_each_sample_is_prepared_once_an_epoch_by_the_worker_that_uses_it(
    loader_runs: Runs,
) -> None:
    used = np.concatenate([results[f"{OWN}used"] for results in loader_runs.of_workers("own_rows")])
    rows, counts = np.unique(used, return_counts=True)
    assert rows.tolist() == list(range(LOADER_ROWS))
    assert counts.tolist() == [LOADER_EPOCHS] * LOADER_ROWS
