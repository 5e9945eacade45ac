"""A process may make several strategies, whichever worker comes to them last."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.full
@pytest.mark.parametrize("between", ["", "saves", "drops"])
@pytest.mark.parametrize(("workers", "late"), [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2)])
def test_later_strategies_are_met_by_all(
    start_workers: Any, workers: int, late: int, between: str
) -> None:
    arguments = [late, 3, 60, between]
    started = start_workers("program_strategies.py", {"worker": workers}, arguments)
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
