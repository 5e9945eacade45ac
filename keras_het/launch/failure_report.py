"""Says which worker failed and why."""

import signal
from collections.abc import Sequence

from keras_het.launch.worker_process import WorkerResult

_LINES = 15
_TRACEBACK = "Traceback (most recent call last)"


def describe_failures(failures: Sequence[WorkerResult], ended: Sequence[WorkerResult] = ()) -> str:
    """Returns the message about failed workers: who was first, why, and their last words.

    The first to exit need not be the first to fail: a worker that lost another may exit before
    that one has. So what the others said is shown as well, if they failed or showed an error.

    Args:
        failures: Workers that failed by themselves, the first to exit first; at least one.
        ended: Workers that were ended because of it. Defaults to none.
    """
    first, *others = failures
    note = " The other workers were ended." if ended else ""
    lines = [f"worker {first.index} failed: {first.describe_exit()}.{note}"]
    lines += [f"worker {other.index} failed after it: {other.describe_exit()}." for other in others]
    if first.exit_code == -signal.SIGKILL:
        lines.append("SIGKILL is often the system's answer to memory that has run out.")
    failing = [result for result in ended if result not in failures and _TRACEBACK in result.stderr]
    lines += [f"worker {other.index} was ended after it had shown an error." for other in failing]
    words = [line for result in (*failures, *failing) for line in last_words(result)]
    return "\n".join([*lines, *words])


def last_words(result: WorkerResult) -> list[str]:
    """Returns the last lines of a worker's standard error, or else of its standard output.

    Args:
        result: How the worker ended.
    """
    for name, text in (("standard error", result.stderr), ("standard output", result.stdout)):
        lines = text.splitlines()[-_LINES:]
        if lines:
            heading = f"last lines of worker {result.index}'s {name}:"
            return [heading, *(f"  {line}" for line in lines)]
    return [f"worker {result.index} printed nothing."]
