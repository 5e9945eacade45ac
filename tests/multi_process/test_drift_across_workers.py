"""Replicas of several workers that have drifted apart: the chief tells, and all become equal."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import written_by_workers

QUICK = ("equal", "a weight", "copied")
CASES = (*QUICK, "of the optimizer", "ignored", "local training", "within a local one")
# Of each: what the chief tells, with workers of 1 and 2 replicas.
TOLD = {
    "a weight": ("/kernel differs most, by ", "between replica 1 (worker 1) and replica 0; 1"),
    "of the optimizer": (
        "kernel_momentum differs",
        "between replica 2 (worker 1) and replica 0; 1",
    ),
    "within a local one": ("kernel_momentum differs", " replica 2 (worker 1) and replica 1; 1 of "),
}
TOLD["copied"] = TOLD["a weight"]


@pytest.mark.full
@pytest.mark.parametrize("devices", ["1,2", "1,1"])
def test_the_chief_names_what_differs(
    start_workers: Any, tmp_path: Path, devices: str, pytestconfig: pytest.Config
) -> None:
    is_quick = pytestconfig.getoption("--quick")
    names = QUICK if is_quick else CASES if devices == "1,2" else CASES[:3]
    found = written_by_workers(start_workers, "program_drift.py", tmp_path, devices, names)
    for name in names:
        messages = [str(each[name][0]) for each in found]
        assert messages[1] == "" and len(found[0][name]) == 1
        assert bool(messages[0]) == (name in TOLD), messages
        assert all(words in messages[0] for words in TOLD.get(name, ())), messages
        rows = np.concatenate([each[f"{name}, replicas"] for each in found])
        are_equal = (rows == rows[0]).all()
        assert are_equal == (name not in ("a weight", "of the optimizer", "ignored")), name
