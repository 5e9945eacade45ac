"""Says which worker failed and why."""

import signal
from collections.abc import Sequence

from keras_het.launch.worker_process import WorkerResult

_LINES = 15


def describe_failures(failures: Sequence[WorkerResult], ends_others: bool) -> str:
    """Returns the message about failed workers: who was first, why, and its last words.

    Args:
        failures: Workers that failed by themselves, the first one first; at least one.
        ends_others: Whether other workers were ended because of it.
    """
    first, *others = failures
    ended = " The other workers were ended." if ends_others else ""
    lines = [f"worker {first.index} failed: {first.describe_exit()}.{ended}"]
    lines += [f"worker {other.index} failed after it: {other.describe_exit()}." for other in others]
    if first.exit_code == -signal.SIGKILL:
        lines.append("SIGKILL is often the system's answer to memory that has run out.")
    return "\n".join([*lines, *last_words(first)])


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
