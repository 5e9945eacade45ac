"""Python's tracebacks in the output of workers: parsed, and shown once."""

import re
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TRACEBACK = "Traceback (most recent call last)"

_CHAIN = ("During handling of the above exception", "The above exception was the direct cause")
_FRAME = re.compile(r'  File "(?P<path>[^"]+)", line (?P<line>\d+)')
_ERROR = re.compile(r"(?:[\w.]+\.)?(?P<text>\w+(?:: .*)?)$")
# TensorFlow's text between "Graph execution error:" and the error itself.
_OF_GRAPHS = ("Detected at node", "Stack trace for op definition", "<stack traces unavailable>")
# Errors that only say that another worker is gone: ours, and TensorFlow's.
_EFFECT = re.compile(r"WorkerLostError|UnavailableError|.*Collective ops is aborted by: ")
# Information that TensorFlow's C++ code logs, including its messages about a broken connection or a
# signal, before Python reports them better.
_LOGGED = re.compile(
    r"I\d{4} \S+ +\d+ \w+\.(cc|h):"
    r"|[WE]\d{4} \S+ +\d+ (base_collective_executor|ring_alg|local_rendezvous|worker|"
    r"preemption_notifier|coordination_service\w*)\.(cc|h):"
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
    starts = [index for index, line in enumerate(lines) if line.startswith(TRACEBACK)]
    if not starts:
        return None
    rest = lines[starts[-1] + 1 :]
    end = next((index for index, line in enumerate(rest) if _ends_traceback(line)), None)
    if end is None:
        return None
    text = _error_text(rest[end])
    if text.endswith(":"):
        following = (
            line.strip()
            for line in rest[end + 1 :]
            if line.strip() and not line[0].isspace() and not line.startswith(_OF_GRAPHS)
        )
        text = f"{text} {next(following, '')}".rstrip()
    return UncaughtError(text, _place(rest[:end]))


class TracebackFolder:
    """Filter of the workers' standard error: each error is shown once, effects in one line.

    A traceback is held back until its error is known.
    """

    def __init__(self, keep_logs: bool = False) -> None:
        self._keep_logs = keep_logs
        self._held: dict[int, list[str]] = {}
        self._first_with: dict[str, int] = {}

    def feed(self, worker_index: int, line: str) -> list[str]:
        held = self._held.get(worker_index)
        if held is None:
            if line.startswith(TRACEBACK):
                self._held[worker_index] = [line]
                return []
            return [] if not self._keep_logs and _LOGGED.match(line) else [line]
        held.append(line)
        if not _ends_traceback(line):
            return []
        del self._held[worker_index]
        text = _error_text(line)
        if _EFFECT.match(text):
            return [text]
        first = self._first_with.setdefault(text, worker_index)
        return held if first == worker_index else [f"{text} (as on worker {first})"]

    def finish(self) -> list[tuple[int, str]]:
        """Return the retained lines of incomplete tracebacks, each with its worker."""
        rest = [(index, line) for index, held in self._held.items() for line in held]
        self._held.clear()
        return rest


def _ends_traceback(line: str) -> bool:
    return bool(line) and not line[0].isspace() and not line.startswith((TRACEBACK, *_CHAIN))


def _error_text(line: str) -> str:
    match = _ERROR.match(line)
    return match["text"] if match else line


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
