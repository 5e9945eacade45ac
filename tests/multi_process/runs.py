"""Runs checks on a cluster and on one device, and compares what they have written."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked_workers import TIMEOUT, Workers, cluster_environments
from recorded import ONLY_WORKERS, OWN

# Float32 sums in another order, see tests/exactness/equivalence.py.
RTOL, ATOL = 1e-4, 2e-6
# The first and the last of three workers share a host. macOS has but one address.
HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.1") if sys.platform == "linux" else None

Results = Mapping[str, np.ndarray]


class Written:
    """What processes have written of each check, once they have ended.

    Args:
        folder: where they write.
        processes: for each program, what runs it and how many of those write; others may continue.
        longest_seconds: time for all checks.
    """

    def __init__(
        self,
        folder: Path,
        processes: Sequence[tuple[Workers, int]],
        longest_seconds: float = TIMEOUT,
    ) -> None:
        self._folder, self._processes = folder, processes
        for workers, number in processes:
            try:
                for index in range(number):
                    workers.wait_for(index, longest_seconds)
            except TimeoutError:
                # The checks that were reached are still worth comparing; the others fail.
                workers.close()

    def load(self, check: str, task: str) -> Results:
        path = self._folder / f"{check.replace('/', '-')}-{task}.npz"
        if not path.exists():
            tails = "\n".join(workers.tails() for workers, _ in self._processes)
            pytest.fail(f"{task} did not come to the end of {check}:\n{tails}")
        with np.load(path) as stored:
            results = dict(stored)
        assert "failed" not in results, f"{check} on {task}:\n{results['failed']}"
        return results


def written_by_workers(
    start: Any, program: str, folder: Path, devices: str, cases: Sequence[str]
) -> list[dict[str, np.ndarray]]:
    """Run cases of a program on workers with these devices; return what each has written."""
    number = len(devices.split(","))
    arguments = [str(folder), devices, *cases]
    for each in start(program, {"worker": number}, arguments).wait()[::-1]:
        assert each.exit_code == 0, each.output[-3000:]
    return [dict(np.load(folder / f"{index}.npz")) for index in range(number)]


class Runs(Written):
    """What the workers of one cluster and one device have written.

    Args:
        start: the fixture that starts workers.
        folder: for the results.
        module: module of the checks.
        checks: their names.
        jobs: name of each job to its number of tasks.
        devices: number of devices of each worker, separated by commas.
        summation: settings of the summation; None for all-reduce.
        environment: variables of all tasks.
        has_single: whether one device runs the checks too.
        hosts: the address of each task's host, all of this machine.
    """

    def __init__(
        self,
        start: Any,
        folder: Path,
        module: str,
        checks: Sequence[str],
        jobs: Mapping[str, int],
        devices: str,
        summation: dict[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        has_single: bool = True,
        hosts: Sequence[str] | None = None,
    ) -> None:
        self.checks = checks
        self.num_workers = len(devices.split(","))
        settings, program = json.dumps(summation), "program_exactness.py"
        started = []
        if has_single:
            arguments = [folder, module, "0", settings, *checks]
            started.append((start(program, arguments=arguments), 1))
        self.workers = start(
            program,
            arguments=[folder, module, devices, settings, *checks],
            environments=cluster_environments(jobs, environment, hosts),
        )
        super().__init__(folder, [*started, (self.workers, self.num_workers)])

    def of_workers(self, check: str) -> list[Results]:
        return [self.load(check, f"worker_{index}") for index in range(self.num_workers)]

    def of_one_device(self, check: str) -> Results:
        return self.load(check, "single")

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


def _without(results: Results, prefixes: tuple[str, ...]) -> set[str]:
    return {name for name in results if not name.startswith(prefixes)}


def _close(actual: np.ndarray, expected: np.ndarray, name: str) -> None:
    if expected.dtype.kind in "iub":
        np.testing.assert_array_equal(actual, expected, err_msg=name)
    else:
        np.testing.assert_allclose(actual, expected, rtol=RTOL, atol=ATOL, err_msg=name)
