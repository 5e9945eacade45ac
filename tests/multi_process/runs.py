"""Runs checks on a cluster and on one device, and compares what they have written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recorded import ONLY_WORKERS, OWN

# Float32 sums in another order, see tests/exactness/equivalence.py.
RTOL, ATOL = 1e-4, 2e-6

Results = Mapping[str, np.ndarray]


class Runs:
    """What the workers of one cluster and one device have written.

    Args:
        start: the fixture that starts workers.
        folder: for the results.
        module: module of the checks.
        checks: their names.
        jobs: name of each job to its number of tasks.
        devices: number of devices of each worker, separated by commas.
    """

    def __init__(
        self,
        start: Any,
        folder: Path,
        module: str,
        checks: Sequence[str],
        jobs: Mapping[str, int],
        devices: str,
    ) -> None:
        self._folder = folder
        self._num_workers = sum(jobs.values())
        self.single = start("program_exactness.py", None, [folder, module, "0", *checks])
        self.workers = start("program_exactness.py", jobs, [folder, module, devices, *checks])
        for processes in (self.single, self.workers):
            try:
                processes.wait()
            except TimeoutError:
                # The checks that were reached are still worth comparing; the others fail.
                processes.close()

    def of_workers(self, check: str) -> list[Results]:
        return [self._load(check, f"worker_{index}") for index in range(self._num_workers)]

    def of_one_device(self, check: str) -> Results:
        return self._load(check, "single")

    def assert_as_one_device(self, check: str) -> None:
        """Fails unless the chief has what one device has, and all workers have the same bits."""
        expected = self.of_one_device(check)
        chief, *others = self.of_workers(check)
        comparable = _without(expected, (ONLY_WORKERS, OWN))
        assert comparable == _without(chief, (ONLY_WORKERS, OWN))
        for name in sorted(comparable):
            _close(chief[name], expected[name], name)
        for index, other in enumerate(others, start=1):
            assert _without(other, (OWN,)) == _without(chief, (OWN,))
            for name in _without(chief, (OWN,)):
                np.testing.assert_array_equal(
                    other[name], chief[name], err_msg=f"{name} of worker {index} and the chief"
                )

    def _load(self, check: str, name: str) -> Results:
        path = self._folder / f"{check}-{name}.npz"
        if not path.exists():
            tails = f"{self.workers.tails()}\n{self.single.tails()}"
            pytest.fail(f"{name} did not come to the end of {check}:\n{tails}")
        with np.load(path) as stored:
            results = dict(stored)
        assert "failed" not in results, f"{check} on {name}:\n{results['failed']}"
        return results


def _without(results: Results, prefixes: tuple[str, ...]) -> set[str]:
    return {name for name in results if not name.startswith(prefixes)}


def _close(actual: np.ndarray, expected: np.ndarray, name: str) -> None:
    if expected.dtype.kind in "iub":
        np.testing.assert_array_equal(actual, expected, err_msg=name)
    else:
        np.testing.assert_allclose(actual, expected, rtol=RTOL, atol=ATOL, err_msg=name)
