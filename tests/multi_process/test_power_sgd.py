"""Gradients that travel with low rank: the algorithm in numpy, and the same weights everywhere."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import written_by_workers

QUICK = ("shares", "in parts")
CASES = (*QUICK, "in one call", "clipped", "in buckets", "compiled", "eager", "measured")


@pytest.mark.parametrize("devices", ["1,2", pytest.param("1,1,1", marks=pytest.mark.full)])
def test_workers_train_as_the_algorithm_says(
    start_workers: Any, tmp_path: Path, devices: str, pytestconfig: pytest.Config
) -> None:
    program = "program_power_sgd.py"
    cases = QUICK if pytestconfig.getoption("--quick") else CASES
    names = (*cases, "float32", "whole")
    found, *others = written_by_workers(start_workers, program, tmp_path, devices, names)
    for other in others:
        for name in (*cases, "float32", "scaled"):
            np.testing.assert_array_equal(other[name], found[name])
    for name in (*cases, "whole"):
        np.testing.assert_allclose(found[name], found[f"{name}, expected"], rtol=1e-9, atol=1e-12)
        assert (found[f"{name}, compiled"] > 0) == (name == "compiled")
    np.testing.assert_allclose(found["float32"], found["float32, expected"], rtol=1e-4, atol=1e-6)
    assert np.abs(found["in parts"] - found["whole"]).max() > 1e-3
    for name in {"float32", "in parts", "in one call", "clipped"}.intersection(names):
        assert found[f"{name}, sums"] == found["whole, sums"] + 2  # two more in a step
    assert_overflows_change_nothing(found["scaled"])
    np.testing.assert_allclose(
        found["scaled"][-1, 1:], found["scaled, expected"], rtol=1e-4, atol=1e-6
    )


def assert_overflows_change_nothing(steps: np.ndarray) -> None:
    scale, weights = steps[:, 0], steps[:, 1:]
    is_skipped = scale[1:] < scale[:-1]
    assert is_skipped.sum() > 3 and (~is_skipped).sum() > 6
    moved = (weights[1:] != weights[:-1]).any(axis=1)
    np.testing.assert_array_equal(moved, ~is_skipped)
