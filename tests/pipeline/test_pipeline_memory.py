"""Recomputation lowers the peak of memory that a training reaches."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("program_peak.py")
# The C library gives memory back at once, so that the process has what TensorFlow has.
SETTINGS = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
}
LEAST_SAVED = 0.25


def grown_bytes(recompute: str, stages: int) -> int:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), recompute, str(stages)],
        env={**os.environ, **SETTINGS},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return int(done.stdout.split("grown by")[-1])


@pytest.mark.full
def test_recomputation_lowers_peak_memory() -> None:
    kept, again = (grown_bytes(recompute, 4) for recompute in ("never", "always"))
    assert again <= (1 - LEAST_SAVED) * kept, f"{again / 1e6:.0f} of {kept / 1e6:.0f} MB"
