"""Workers with GPUs ask for NCCL, and find out whether it answers; on CPUs, which ignore it."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.quick("answers-nccl")
@pytest.mark.parametrize(("kind", "hint"), [("answers", "nccl"), ("one GPU", "auto")])
def test_the_hint_of_collectives(start_workers: Any, kind: str, hint: str) -> None:
    results = start_workers("program_nccl.py", {"worker": 2}, [kind]).wait()
    assert [worker.exit_code for worker in results] == [0, 0], results[0].output
    for worker in results:
        assert f"HINTS {hint}\n" in worker.output
    assert ("Workers share a GPU" in results[0].output) == (kind == "one GPU")


@pytest.mark.full
def test_nccl_that_does_not_answer_is_one_error(start_workers: Any) -> None:
    started = start_workers("program_nccl.py", {"worker": 2}, ["hangs"])
    result = started.wait_for(0)
    assert result.exit_code == 1
    last = result.output.strip().splitlines()[-1]
    assert last.startswith("RuntimeError: NCCL does not sum between the GPUs of the workers.")
    assert "no answer within 3 s" in last and "NCCL_SOCKET_IFNAME" in last
