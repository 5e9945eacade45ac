"""The workers of these tests are told apart, also when the system gives a process id again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

LAST_PROCESS_ID = Path("/proc/sys/kernel/ns_last_pid")
SAYS_ITS_PROCESS_ID = """
import os, sys
print("process", os.getpid(), flush=True)
if sys.argv[1] == "stay":
    sys.stdin = os.fdopen(os.pipe()[0])
    sys.stdin.read()
"""


def test_a_process_id_that_is_used_again_is_another_worker(
    start_workers: Any, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(SAYS_ITS_PROCESS_ID)
    first = start_workers(str(program), None, ["end"]).wait()[0]
    assert first.exit_code == 0
    # other processes of this machine may take the process id first
    for _ in range(50):
        _give_again(int(first.output.split()[1]))
        second = start_workers(str(program), None, ["stay"])
        second.wait_for_output(0, "process")
        if second.output(0) == first.output:
            break
        second.close()
    else:
        pytest.skip("other processes took the process id each time")
    with pytest.raises(TimeoutError, match="still runs"):
        second.wait_for(0, timeout=0.1)
    second.send_signal(0)
    assert second.wait_for(0).exit_code == -9


def test_a_worker_that_ends_at_once_has_its_exit_code(start_workers: Any, tmp_path: Path) -> None:
    workers = start_workers(str(tmp_path / "missing.py"), None, environments=[{}] * 4)
    assert [result.exit_code for result in workers.wait()] == [1] * 4
    with pytest.raises(AssertionError, match="worker 3 ended, exit code 1, without 'ready'"):
        workers.wait_for_output(3, "ready")


def _give_again(process_id: int) -> None:
    try:
        LAST_PROCESS_ID.write_text(str(process_id - 1))
    except OSError as error:
        pytest.skip(f"the next process id cannot be chosen: {error}")
