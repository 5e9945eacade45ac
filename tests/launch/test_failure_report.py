"""The launcher's last line: which worker was the first, and why."""

import dataclasses

import pytest

from keras_het.launch.local.failure_report import describe_failures
from keras_het.launch.local.worker_process import WorkerResult

FOLLOWS = "Another worker has received {}: all workers end here.\n"


@pytest.mark.parametrize(
    ("name", "code"), [("SIGTERM", 143), ("SIGTERM", -15), ("SIGINT", -2), ("SIGHUP", -1)]
)
@pytest.mark.parametrize("is_last", [True, False])
def test_the_worker_that_received_a_signal_is_named(name: str, code: int, is_last: bool) -> None:
    """It may leave after the others, when the launcher is already ending all."""
    follows = FOLLOWS.format(name)
    # by the launcher's signal, if that came first
    asked = (
        WorkerResult(1, 143, True, 3.0, "", "")
        if is_last
        else WorkerResult(1, code, False, 1.0, "", "")
    )
    others = [
        WorkerResult(index, code, index == 2 or not is_last, 2.0, "", follows) for index in (0, 2)
    ]
    *effects, cause = describe_failures([others[0], asked, others[1]], False).splitlines()
    assert effects == ["worker 0 ended with it.", "worker 2 ended with it."]
    assert cause.startswith(f"worker 1 was ended by {name}, which keras-het did not send; ")
    assert "BackupAndRestore" in cause


@pytest.mark.parametrize("code", [1, -15])
def test_an_error_goes_before_the_signal_that_follows_it(code: int) -> None:
    error = 'Traceback (most recent call last):\n  File "a.py", line 2, in f\nValueError: no rows\n'
    failed = WorkerResult(0, 1, False, 1.0, "", error, 0.5)
    failed = dataclasses.replace(failed, exit_code=code, was_ended=code < 0)
    ended = WorkerResult(1, 143, True, 2.0, "", "")
    *effects, cause = describe_failures([failed, ended], False).splitlines()
    assert effects == ["worker 1 was ended."]
    assert cause == "worker 0 failed first: ValueError: no rows (a.py:2)"
