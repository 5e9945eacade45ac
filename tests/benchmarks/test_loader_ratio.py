"""A tuner that no longer gains anything is noticed, long before its exact gain is known."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
CPUS = 2
# 7 in the full benchmark, about 4 with so few steps; 1 where nothing is tuned.
LEAST_RATIO = 2.0
STEPS = 300
# A process of its own: the benchmark forks, before TensorFlow has started.
MEASURE = f"""
import json, os
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:{CPUS}])
import loader
name = "a: blocking I/O"
seconds = {{"autotune": 2.0, "tuner": 60.0}}
found = [loader.measure(name, policy, {STEPS}, most) for policy, most in seconds.items()]
print(json.dumps(found, default=float))
"""


@pytest.mark.alone
@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="AUTOTUNE must not have as many threads as CPUs"
)
def test_blocking_reads_are_tuned_far_beyond_autotune():
    done = subprocess.run(
        [sys.executable, "-c", MEASURE], cwd=FOLDER, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    autotune, tuner = json.loads(done.stdout.splitlines()[-1])
    assert tuner["steps"] == tuner["measured_steps"] == STEPS
    assert tuner["moves"] >= 1
    threads = int(re.search(r"threads=(\d+)", tuner["settings"])[1])
    assert threads > CPUS, "AUTOTUNE can have as many"
    assert tuner["steps_per_s"] >= LEAST_RATIO * autotune["steps_per_s"]
