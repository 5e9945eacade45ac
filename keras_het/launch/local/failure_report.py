"""Report on which worker failed first and why."""

import re
import signal
import tempfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from keras_het.launch.local.tracebacks import HEADINGS, UncaughtError, uncaught_error
from keras_het.launch.local.worker_process import WorkerResult, signal_name

_LINES = 15
# What a strategy says where another worker has received the signal that ends all.
_FOLLOWS = re.compile(r"Another worker has received (SIG\w+)")
_REQUESTS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# How C++, its library and Python's interpreter say why they abort.
_ABORT = re.compile(
    r"F\d{4} |Fatal Python error: (?!Aborted|Segmentation)|terminate called |  what\(\): "
    r"|.*Check failed: |.*Assertion .* failed|(malloc|free)\(\): |double free |corrupted "
)


def describe_failures(results: Sequence[WorkerResult], show_last_lines: bool = True) -> str:
    first = first_to_fail(results)
    lines = [
        f"worker {result.index} {_effect(result, _error(first))}"
        for result in results
        if result is not first and (result.has_failed or result.was_ended)
    ]
    if show_last_lines:
        lines += last_words(first)
    return "\n".join([*lines, _cause(first, results)])


def first_to_fail(results: Sequence[WorkerResult]) -> WorkerResult:
    failed = [result for result in results if result.has_failed]
    with_error = [result for result in failed if _error(result) or result.exit_code < 0]
    # A traceback that a worker only logged looks the same, so errors that ended a worker go first.
    ended_with_error = [result for result in results if result.was_ended and _error(result)]
    for some in (with_error, ended_with_error, failed):
        causes = [result for result in some if not _is_effect(result)]
        if causes:
            return min(causes, key=_failed_at)
    if any(map(_follows, failed)):
        asked = [result for result in results if _request(result) and not _follows(result)]
        if asked:
            return min(asked, key=_failed_at)
    left = [result for result in results if result.exit_code == 0 and not result.was_ended]
    return min([*left, *failed], key=lambda result: result.exited_at)


def last_words(result: WorkerResult) -> list[str]:
    for name, text in (("standard error", result.stderr), ("standard output", result.stdout)):
        if lines := text.splitlines():
            tracebacks = [at for at, line in enumerate(lines) if line.startswith(HEADINGS)]
            begin = min([*tracebacks[-1:], max(0, len(lines) - _LINES)])
            heading = f"last lines of worker {result.index}'s {name}:"
            return [heading, *(f"  {line}" for line in lines[begin:])]
    return [f"worker {result.index} printed nothing."]


def save_output(results: Sequence[WorkerResult], indices: Collection[int]) -> Iterator[str]:
    """Write what some workers printed into files, if their errors are others than the cause."""
    cause = _error(first_to_fail(results))
    for result in results:
        error = _error(result)
        is_known = (
            error is None or error.is_effect or (cause is not None and error.text == cause.text)
        )
        if result.index in indices and not is_known:
            path = Path(tempfile.mkdtemp(prefix="keras-het-")) / f"worker-{result.index}.log"
            path.write_text(f"{result.stdout}\n{result.stderr}\n", encoding="utf-8")
            yield f"all that worker {result.index} printed: {path}"


def _cause(first: WorkerResult, results: Sequence[WorkerResult]) -> str:
    name = f"worker {first.index}"
    if first.exit_code == 0 and not first.was_ended:
        return (
            f"{name} ended its script first, without an error, and the others still needed it: all "
            "workers must call fit, evaluate, predict and save alike"
        )
    error = _error(first)
    number = _request(first)
    if number and (error is None or error.text == "KeyboardInterrupt"):
        # the launcher may have sent another signal before the first one had its effect
        sent = [found[1] for each in results if (found := _FOLLOWS.search(each.stderr))]
        return (
            f"{name} was ended by {next(iter(sent), signal_name(number))}, which keras-het did not "
            "send; start again: with keras_het.callbacks.BackupAndRestore training continues where "
            "it was saved"
        )
    verb = "failed first" if len(results) > 1 else "failed"
    reason = str(error or f"{first.describe_exit()}{_last_line(first)}")
    if first.exit_code == -signal.SIGKILL and not first.was_ended:
        reason += ", which is often the system's answer to memory that has run out"
    return f"{name} {verb}: {reason}"


def _last_line(result: WorkerResult) -> str:
    """Return what a worker without a traceback said last, for instance with `sys.exit`."""
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    if result.exit_code < 0:
        lines = [line for line in lines if _ABORT.match(line)]
    return f": {lines[-1].strip()}" if lines else ""


def _effect(result: WorkerResult, cause: UncaughtError | None) -> str:
    error = _error(result)
    if _follows(result):
        return "ended with it."
    if error is None:
        return "was ended." if result.was_ended else f"failed after it: {result.describe_exit()}."
    if error.is_effect:
        return "lost it, and ended."
    if cause is not None and error.text == cause.text:
        return "failed with the same error."
    return f"failed after it: {error}"


def _is_effect(result: WorkerResult) -> bool:
    error = _error(result)
    return _follows(result) or (error is not None and error.is_effect)


def _follows(result: WorkerResult) -> bool:
    """Whether it ended because another worker had received a signal."""
    return _request(result) != 0 and _FOLLOWS.search(result.stderr) is not None


def _request(result: WorkerResult) -> int:
    """Return the signal that asked a worker to end, 0 if none did."""
    ends = {code: number for number in _REQUESTS for code in (-number, 128 + number)}
    return ends.get(result.exit_code, 0)


def _failed_at(result: WorkerResult) -> float:
    return result.exited_at if result.error_at is None else result.error_at


def _error(result: WorkerResult) -> UncaughtError | None:
    """Return the error that ended a worker; a traceback before a kill or a crash is unrelated."""
    was_killed = result.exit_code < 0 and not result.was_ended
    return None if was_killed else uncaught_error(result.stderr.splitlines())
