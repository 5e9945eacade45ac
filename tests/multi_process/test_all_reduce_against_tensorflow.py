"""Our all-reduce and that of TensorFlow's MultiWorkerMirroredStrategy give the same sums."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest


def _sums(start_workers: Any, which: str, folder: Path) -> list[dict[str, np.ndarray]]:
    workers = start_workers("program_all_reduce.py", {"worker": 2}, [which, folder])
    for result in workers.wait():
        assert result.exit_code == 0, result.output
    loaded = []
    for index in range(2):
        with np.load(folder / f"{which}-{index}.npz") as stored:
            loaded.append(dict(stored))
    return loaded


@pytest.mark.full
def test_same_sums_as_multi_worker_mirrored_strategy(start_workers: Any, tmp_path: Path) -> None:
    theirs = _sums(start_workers, "tensorflow", tmp_path)
    ours = _sums(start_workers, "ours", tmp_path)
    for our_worker, their_worker in zip(ours, theirs, strict=True):
        assert len(our_worker) == 6 + 2 + 2
        assert our_worker.keys() == their_worker.keys()
        for name, expected in their_worker.items():
            # Two summands: there is only one order to add them in.
            np.testing.assert_array_equal(our_worker[name], expected, err_msg=name)
            assert np.abs(expected).max() > 0
