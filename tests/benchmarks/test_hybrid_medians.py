"""What a row of benchmarks/hybrid.py says of trainings that do not reach the target."""

import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def hybrid(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("hybrid")


def row_of(hybrid, *seconds):
    runs = [{"seconds": each, "samples_per_s": 1.0, "step_ms": 1.0} for each in seconds]
    row = hybrid._row("slow_link", "hybrid", runs, "hybrid")
    return row["fastest"], row["time_to_target"], row["slowest"]


def test_a_training_that_does_not_reach_the_target_is_the_slowest(hybrid):
    assert row_of(hybrid, 9.5, None, 13.5) == (9.5, 13.5, None)
    assert row_of(hybrid, 9.5, 12.0, 13.5) == (9.5, 12.0, 13.5)


def test_there_is_no_time_if_half_of_them_do_not(hybrid):
    assert row_of(hybrid, 9.5, None, None) == (9.5, None, None)
