"""Gradients that travel in 16 bits: rounded once by each worker, and summed in 32."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import written_by_workers

CASES = ("bfloat16", "measured", "in buckets", "in parts", "compiled")


@pytest.mark.full
@pytest.mark.parametrize("devices", ["1,2", "1,1,1", "1,1,2,1"])
def test_each_worker_rounds_its_gradient_once(
    start_workers: Any, tmp_path: Path, devices: str
) -> None:
    program = "program_communication_dtype.py"
    names = (*CASES, "as they are")
    found = written_by_workers(start_workers, program, tmp_path, devices, names)
    for name in names:
        for each in found[1:]:
            np.testing.assert_array_equal(each[name], found[0][name])
        np.testing.assert_allclose(found[0][name], found[0][f"{name}, expected"], rtol=2e-6)
        assert (found[0][f"{name}, compiled"] > 0) == (name == "compiled")
    exact = found[0]["as they are"]
    assert all(np.abs(found[0][name] / exact - 1).max() > 1e-5 for name in CASES)
    assert np.all(found[0]["seconds"] > 0)  # of each replica
    assert_overflows_are_skipped(found[0]["scaled"])
    for each in found[1:]:
        np.testing.assert_array_equal(each["scaled"], found[0]["scaled"])


def assert_overflows_are_skipped(steps: np.ndarray) -> None:
    """A step whose gradient overflows float16 halves the loss scale and moves no weight."""
    scale, weights = steps[:, 0], steps[:, 1:]
    is_skipped = scale[1:] < scale[:-1]
    assert is_skipped[0] and not is_skipped.all()
    moved = (weights[1:] != weights[:-1]).any(axis=1)
    np.testing.assert_array_equal(moved, ~is_skipped)
    assert np.isfinite(steps).all()
