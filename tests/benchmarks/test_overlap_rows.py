"""What benchmarks/overlap.py compares with what."""

import importlib
import sys
from pathlib import Path

import pytest

SIZE = 12_500_000  # bytes; two workers need 200 ms for them at 500 Mbit/s
FOUND = {
    "alone": [0.3, 0.1, 0.25],
    "one bucket": [0.5],
    "DDP alone": [0.1],
    "DDP": [0.3],
    "DDP in buckets of 1 MB": [0.24],
}


@pytest.fixture
def overlap():
    return importlib.import_module("overlap")


def ratios_of(overlap, found):
    rows = overlap.rows_of("mlp", 2, 500.0, found, SIZE)
    return {row["mode"]: (row["bound_ms"], *(row[name] for name in overlap.RATIOS)) for row in rows}


def test_each_is_held_against_its_own_bound(overlap):
    assert ratios_of(overlap, FOUND) == {
        "alone": (250.0, 1.0, None),
        "one bucket": (250.0, 2.0, 1.667),
        "DDP alone": (200.0, 0.5, None),
        "DDP": (200.0, 1.5, 1.25),
        "DDP in buckets of 1 MB": (200.0, 1.2, 1.0),
    }


@pytest.mark.parametrize("missing", [["DDP alone"], ["DDP", "DDP in buckets of 1 MB"], ["alone"]])
def test_nothing_is_compared_with_half_a_peer(overlap, missing):
    found = {mode: each for mode, each in FOUND.items() if mode not in missing}
    assert {ratio for _, _, ratio in ratios_of(overlap, found).values()} == {None}


def test_why_a_python_is_of_no_use(overlap, tmp_path):
    missing = tmp_path / "python"
    version, reason = overlap._torch_version(missing)
    assert version is None
    assert str(missing) in reason and "--torch-python" in reason
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n')
    bare.chmod(0o755)
    version, reason = overlap._torch_version(bare)
    assert version is None
    assert "No module named 'torch'" in reason


def test_the_default_python_is_the_one_that_make_installs(overlap):
    makefile = Path(__file__).parents[2] / "Makefile"
    folder = overlap.TORCH_PYTHON.parents[1].name
    assert f"\n{folder}/installed:" in makefile.read_text()
