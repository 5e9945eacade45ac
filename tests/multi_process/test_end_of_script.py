"""Workers that end their scripts at different times, and Ctrl-C on the launcher."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from keras_het.launch.local.local_cluster import LocalCluster

SCRIPT = str(Path(__file__).with_name("program_fit.py"))
FOR_EVER = 10_000_000
TIMEOUT = 240.0


@pytest.mark.full
@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("seconds_between", [0.0, 1.5])
def test_workers_end_at_different_times(
    start_workers: Any, late: int, seconds_between: float
) -> None:
    seconds = [0.0, 0.0]
    seconds[late] = seconds_between
    workers = start_workers(
        "program_fit.py", {"worker": 2}, [json.dumps({"steps": 25, "exit_late": seconds})]
    )
    for result in workers.wait():
        assert result.exit_code == 0, result.output
        assert "finished" in result.output
        assert "Error" not in result.output


@pytest.mark.full
def test_fresh_processes_end_cleanly() -> None:
    """Not forked: these interpreters import, train and shut down by themselves."""
    options = json.dumps({"steps": 25, "exit_late": [0.0, 1.0]})
    with LocalCluster([sys.executable, SCRIPT, options], num_workers=2) as cluster:
        for result in cluster.wait(timeout=TIMEOUT):
            assert result.exit_code == 0, result.stderr
            assert "finished" in result.stdout


@pytest.mark.full
def test_ctrl_c_on_the_launcher_ends_all_workers(launch: Any) -> None:
    launcher = launch("program_fit.py", {"steps": FOR_EVER})
    assert launcher.wait_for_output("training", TIMEOUT), launcher.text("stderr")
    workers = psutil.Process(launcher.process_id).children(recursive=True)
    assert len(workers) >= 2
    os.kill(launcher.process_id, signal.SIGINT)
    assert launcher.join(TIMEOUT)
    assert launcher.result().exit_code in (130, -signal.SIGINT)
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert not alive


@pytest.mark.full
def test_a_worker_that_leaves_is_not_taken_for_one_in_a_barrier() -> None:
    program = str(Path(__file__).with_name("program_leave.py"))
    command = [sys.executable, program, "barrier"]
    with LocalCluster(command, num_workers=2, end_on_failure=False) as cluster:
        waiting, leaving = cluster.wait(timeout=TIMEOUT)
    assert (leaving.exit_code, leaving.stderr.splitlines()[-1]) == (1, "no data")
    assert "continued" not in waiting.stdout
    assert waiting.stdout.splitlines()[-1] == "waiting"
    assert waiting.exit_code == 1
