"""Workers that were interrupted in the middle of an epoch end where one device ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np


def test_an_interrupted_cluster_goes_on_at_the_right_sample(
    start_workers: Any, tmp_path: Path
) -> None:
    backup, result, expected = (tmp_path / name for name in ("backup", "result.npz", "one.npz"))
    single = start_workers("program_resume.py", arguments=["", expected, 0])
    # Six steps an epoch: the last backup is after step 8, the third batch of the second epoch.
    interrupted = start_workers("program_resume.py", {"worker": 2}, [backup, result, 9])
    for worker in interrupted.wait():
        assert worker.exit_code == 1
        assert "InterruptedError: the power went out" in worker.output
    assert not result.exists()
    assert backup.exists()
    resumed = start_workers("program_resume.py", {"worker": 2}, [backup, result, 0])
    for worker in [*resumed.wait(), *single.wait()]:
        assert worker.exit_code == 0, worker.output
    with np.load(result) as ours, np.load(expected) as theirs:
        assert ours.keys() == theirs.keys()
        for name in theirs:
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-4, atol=2e-6)
