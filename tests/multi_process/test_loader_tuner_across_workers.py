"""LoaderTuner on two workers: each changes its own data path, and both keep the one order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from recorded import LOADER_EPOCHS, LOADER_ROWS, OWN
from runs import Runs

CHECKS = ("own_rows", "whole_batches")

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def runs(start_for_session: Any, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("loader")
    return Runs(start_for_session, folder, "loader_checks", CHECKS, {"worker": 2}, "1,1")


@pytest.mark.parametrize("check", CHECKS)
def test_two_workers_that_move_equal_one_device(runs: Runs, check: str) -> None:
    runs.assert_as_one_device(check)


@pytest.mark.parametrize("check", CHECKS)
def test_each_worker_moves(runs: Runs, check: str) -> None:
    for results in runs.of_workers(check):
        assert results[f"{OWN}reason"] == "None"
        assert len(results[f"{OWN}moves"]) >= 3
        assert results[f"{OWN}moves"].all()


def test_each_sample_is_prepared_once_an_epoch_by_the_worker_that_uses_it(runs: Runs) -> None:
    used = np.concatenate([results[f"{OWN}used"] for results in runs.of_workers("own_rows")])
    rows, counts = np.unique(used, return_counts=True)
    assert rows.tolist() == list(range(LOADER_ROWS))
    assert counts.tolist() == [LOADER_EPOCHS] * LOADER_ROWS
