"""A process may make several strategies, whichever worker comes to them last."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.quick("2-0")
@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("workers", [2, 3])
def test_later_strategies_are_met_by_all(start_workers: Any, workers: int, late: int) -> None:
    started = start_workers("program_strategies.py", {"worker": workers}, [late, 3, 60])
    results = started.wait()
    assert [worker.exit_code for worker in results] == [0] * workers, results[0].output
    trained = [
        [line for line in worker.output.splitlines() if line.startswith("trained to")]
        for worker in results
    ]
    assert len(trained[0]) == 3 and all(each == trained[0] for each in trained)


@pytest.mark.full
def test_a_strategy_that_one_worker_does_not_make_is_one_error(start_workers: Any) -> None:
    started = start_workers("program_strategies.py", {"worker": 2}, [0, 1, 3])
    result = started.wait_for(1)
    assert result.exit_code == 1
    assert "ValueError: The workers did not all make this strategy within 3 s." in result.output
