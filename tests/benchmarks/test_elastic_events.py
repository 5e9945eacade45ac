"""What benchmarks/elastic.py makes of the events of its processes."""

from __future__ import annotations

from typing import Any

import _elastic_events as elastic_events
import pytest


def step(time: float, number: int, pid: int = 1) -> dict[str, Any]:
    return {"event": "step", "pid": pid, "time": time, "step": number}


# A step a second; killed at 3.5; the next group of workers repeats step 3.
STEPS = [step(1, 1), step(2, 2), step(3, 3), step(10, 3, 2), step(11, 4, 2), step(12, 5, 2)]


def test_a_repeated_step_is_no_progress():
    found = elastic_events.progress(STEPS)
    assert found == [(1, 1), (2, 2), (3, 3), (11, 4), (12, 5)]
    assert elastic_events.step_seconds(found, 3.5) == 1
    assert elastic_events.longest_gap(found, 3.5, 12.5) == 8
    assert elastic_events.useful_seconds(found, 1, 12, 1.0) == 4


def test_a_training_that_stops_makes_no_progress_until_the_end():
    found = elastic_events.progress(STEPS[:3])
    assert elastic_events.longest_gap(found, 3.5, 60) == 57


def test_parts_of_an_interruption_add_up():
    marks = {"function": 6.0, "strategy": 7.0, "model": 7.5, "restored": 8.0}
    events = [{"event": "process", "pid": 2, "time": 4.0}]
    events += [{"event": name, "pid": 2, "time": time} for name, time in marks.items()]
    parts = elastic_events.breakdown([*STEPS, *events], 3.5, 12.5)
    assert parts == {
        "notice_and_end_seconds": 0.5,
        "start_and_import_seconds": 2.0,
        "agree_seconds": 1.0,
        "build_seconds": 0.5,
        "restore_seconds": 0.5,
        "trace_seconds": 2.0,
        "repeat_seconds": 1.0,
    }
    assert sum(parts.values()) == pytest.approx(11 - 3.5)
    assert elastic_events.breakdown(STEPS, 3.5, 12.5) == {}
