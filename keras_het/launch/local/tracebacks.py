"""Python's tracebacks in the output of workers: parsed, and shown of one worker."""

import re
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TRACEBACK = "Traceback (most recent call last)"

_OF_GROUP = f"  + Exception Group {TRACEBACK}"
HEADINGS = (TRACEBACK, _OF_GROUP)
_CHAIN = ("During handling of the above exception", "The above exception was the direct cause")
# What precedes the traceback of an error that does not end the program.
_ASIDE = ("Exception ignored in", "Exception in thread")
_FRAME = re.compile(r' +File "(?P<path>[^"]+)", line (?P<line>\d+)')
# Python 3.11 writes marks at the edge if a line's indentation was lost.
_MARKS = re.compile(r"[~^]+$")
# `python script.py` writes no heading above these.
_OF_SYNTAX = re.compile(r"(SyntaxError|IndentationError|TabError): ")
_ERROR = re.compile(r"(?:[\w.<>]+\.)?(?P<text>\w+(?:: .*)?)$")
_IN_CALL = re.compile(r"(\w+: )'?Exception encountered when calling (.*?\(\))\.")
_BOLD = re.compile(r"\\x1b\[\dm")
_OF_OP = re.compile(r"\{\{function_node \S+\}\} ?")
# What TensorFlow and Keras write between their first line and the error itself.
_BETWEEN = (
    "Detected at node",
    "Stack trace for op definition",
    "<stack traces unavailable>",
    "Could not automatically infer the output shape / dtype",
)
# Errors that only say that another worker is gone: ours, and TensorFlow's.
_EFFECT = re.compile(r"WorkerLostError|UnavailableError|.*Collective ops is aborted by: ")
# Information that TensorFlow's C++ code logs, including its messages about a broken connection or a
# signal, before Python reports them better.
_LOGGED = re.compile(
    r"I\d{4} \S+ +\d+ \w+\.(cc|h):"
    r"|[WE]\d{4} \S+ +\d+ (base_collective_executor|ring_alg|local_rendezvous|worker|"
    r"preemption_notifier|coordination_service\w*|queue_base)\.(cc|h):"
    r"|WARNING: All log messages before absl::InitializeLog\(\)"
    r"|Additional GRPC error information from remote target"
    r"|:UNKNOWN:Error received from peer"
    r"|The error could be from a previous operation\. Restart your program to reset\."
    r"|\t \[\[\{\{node Collective"
)
_PACKAGE = Path(__file__).parents[2]
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")


@dataclass(frozen=True)
class UncaughtError:
    """The error that ended a worker."""

    text: str
    place: str | None

    @property
    def is_effect(self) -> bool:
        return bool(_EFFECT.match(self.text))

    def __str__(self) -> str:
        return f"{self.text} ({self.place})" if self.place else self.text


def uncaught_error(lines: Sequence[str]) -> UncaughtError | None:
    starts = [i for i, line in enumerate(lines) if line.startswith(HEADINGS)]
    if starts:
        own = [i for i in starts if i == 0 or not lines[i - 1].startswith(_ASIDE)]
        start = (own or starts)[-1]
        rest = lines[start + 1 :]
        return _of_group(rest) if lines[start].startswith(_OF_GROUP) else _error(rest)
    ends = [i for i, line in enumerate(lines) if _OF_SYNTAX.match(line)]
    return _error(lines[max(ends[-1] - 3, 0) : ends[-1] + 1]) if ends else None


def _error(lines: Sequence[str]) -> UncaughtError | None:
    """Return the error after the frames of a traceback."""
    end = next((index for index, line in enumerate(lines) if _ends_traceback(line)), None)
    if end is None:
        return None
    text, used = _message(lines[end:])
    # TensorFlow's message has its own frames: where the operation was made.
    return UncaughtError(text, _place(lines[: end + used]))


def _of_group(lines: Sequence[str]) -> UncaughtError | None:
    """Return the error of an exception group along with its first member."""
    group, member = (
        _error([line.removeprefix(bar) for line in lines if line.startswith(bar)])
        for bar in ("  | ", "    | ")
    )
    if group is None or member is None:
        return group
    return UncaughtError(f"{group.text}, first: {member.text}", member.place or group.place)


def _message(lines: Sequence[str]) -> tuple[str, int]:
    """Return an error in one line, and how many lines of its message that takes."""
    # A first line that only introduces the error gets what comes next.
    named = _ERROR.match(lines[0])
    text = _OF_OP.sub("", named["text"] if named else lines[0]).rstrip()
    call = _IN_CALL.match(text)
    if call:
        # The message of a KeyError is quoted.
        quoted = _BOLD.sub("", text[call.end() :]).split("\\n")
        rest = [*quoted, *lines[1:]]
        text = f"{call[1]}in {call[2]}:"
    elif not text.endswith(":"):
        return text, 1
    else:
        rest = ["", *lines[1:]]
    in_graph = text.endswith("Graph execution error:")
    for index, line in enumerate(rest):
        if line.startswith("Arguments received by"):  # an error without a message
            break
        if text.endswith("in user code:"):  # frames and the error, indented
            if line.startswith("    ") and not line.startswith((" " * 5, '    File "')):
                inner, used = _message([each.removeprefix("    ") for each in rest[index:]])
                return inner, index + used
            continue
        is_skipped = not line.strip() or line.startswith(_BETWEEN)
        if not is_skipped and not (in_graph and line[0].isspace()):
            text = f"{text} {line.strip()}"
            if not text.endswith(":"):
                return text, index + 1
    return text.removesuffix(":"), 1


class TracebackFilter:
    """Filter of standard error: frames of the first worker that fails, else the error alone."""

    def __init__(self, keep_logs: bool = False, shown: int | None = None) -> None:
        self.shown, self.hidden = shown, set[int]()
        self._keep_logs = keep_logs
        self._inside: set[int] = set()

    def shows(self, worker_index: int, line: str) -> bool:
        if line.startswith((*HEADINGS, *_CHAIN)):
            self._inside.add(worker_index)
            if self.shown is None:
                self.shown = worker_index
            if self.shown != worker_index:
                self.hidden.add(worker_index)
        elif _ends_traceback(line):
            self._inside.discard(worker_index)
        is_frame = worker_index in self._inside and worker_index != self.shown
        return not is_frame and (self._keep_logs or not _LOGGED.match(line))


def _ends_traceback(line: str) -> bool:
    is_inside = line.startswith((" ", "\t", TRACEBACK, *_CHAIN)) or _MARKS.match(line)
    return bool(line) and not is_inside


def _place(frames: Sequence[str]) -> str | None:
    found = [match for line in frames if (match := _FRAME.match(line)) and _is_users(match["path"])]
    if not found:
        return None
    path = Path(found[-1]["path"])
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{shown}:{found[-1]['line']}"


def _is_users(path: str) -> bool:
    """Tell whether a file belongs neither to a package nor to Python, and was not generated."""
    generated = path.startswith("<") or Path(path).name.startswith("__autograph_generated")
    library = "site-packages" in path or path.startswith(_STANDARD_LIBRARY)
    return not generated and not library and not Path(path).is_relative_to(_PACKAGE)
