"""One local worker: its process group, its captured output and its end."""

import contextlib
import io
import os
import re
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from keras_het.launch.local.tracebacks import HEADINGS

_CONTROL_SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
# A process that left the worker's group could keep the pipes open forever.
_DRAIN_SECONDS = 5.0
# The signals that end a worker when another has failed.
_ENDING = (signal.SIGTERM, signal.SIGKILL)

Stream = Literal["stdout", "stderr"]
STREAMS: tuple[Stream, ...] = ("stdout", "stderr")


@dataclass(frozen=True)
class OutputLine:
    """One line, or one state of a line that is still being redrawn."""

    text: str
    is_final: bool


def output_lines(pipe: io.RawIOBase) -> Iterator[OutputLine]:
    r"""Split UTF-8 text at `\n`, `\r\n` and `\r` as it arrives."""
    # A terminal shows only the last of several texts separated by `\r`: the others are not final.
    # Keras prints backspaces only to go back to the start of the line.
    buffer, redrawn = io.BufferedReader(pipe), ""
    for line in io.TextIOWrapper(buffer, encoding="utf-8", errors="replace", newline=""):
        text, is_final = line.rstrip("\r\n").replace("\b", ""), not line.endswith("\r")
        # `\r\n` at the end of a progress bar: the text on the screen is the last state.
        shown = text or redrawn
        redrawn = "" if is_final else shown
        if is_final or text:
            yield OutputLine(shown, is_final)
    if redrawn:
        yield OutputLine(redrawn, True)


def strip_ansi(text: str) -> str:
    return _CONTROL_SEQUENCE.sub("", text)


OnLine = Callable[[int, Stream, OutputLine], None]


@dataclass(frozen=True)
class WorkerResult:
    """The end of one worker.

    Args:
        index: The worker.
        exit_code: Exit code, or minus the number of the signal that killed it.
        was_ended: Whether the cluster had sent it a signal to end it before it exited.
        exited_at: Time of the exit, in seconds of `time.monotonic`.
        stdout: Captured lines of standard output, colours removed.
        stderr: Captured lines of standard error, colours removed.
        error_at: Time at which its last traceback began, as `exited_at`; `None` without one.
    """

    index: int
    exit_code: int
    was_ended: bool
    exited_at: float
    stdout: str
    stderr: str
    error_at: float | None = None

    @property
    def has_failed(self) -> bool:
        """Whether it failed by itself, even while it was being ended."""
        if not self.was_ended:
            return self.exit_code != 0
        # a handler of the signal uses such an exit code
        obeyed = {0, *(-number for number in _ENDING), *(128 + number for number in _ENDING)}
        return self.exit_code not in obeyed

    @property
    def shell_exit_code(self) -> int:
        """The exit code in a shell's form: 128 + the signal for a killed worker."""
        return self.exit_code if self.exit_code >= 0 else 128 - self.exit_code

    def describe_exit(self) -> str:
        """Return `exit code 3` or `killed by SIGKILL`."""
        if self.exit_code >= 0:
            return f"exit code {self.exit_code}"
        return f"killed by {signal_name(-self.exit_code)}"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class WorkerProcess:
    """A worker in its own session, so that a signal reaches everything it started."""

    # With `opening`, the first line of its standard input, signals follow there as numbers: the
    # process stands for a worker on another machine.

    def __init__(
        self,
        index: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        on_line: OnLine,
        on_exit: Callable[[int], None],
        cpus: Sequence[int] | None = None,
        cwd: str | None = None,
        keep_lines: int | None = None,
        opening: str | None = None,
    ) -> None:
        self.index = index
        self.was_ended = False
        self._on_line = on_line
        self._on_exit = on_exit
        self._exited_at = 0.0
        self._error_at: float | None = None
        self._lines: dict[Stream, deque[str]] = {s: deque(maxlen=keep_lines) for s in STREAMS}
        self._changed = threading.Condition()
        self._is_complete = False
        with _affinity(cpus):
            self._process = _start(command, environment, cwd, opening is not None)
        if opening is not None:
            self._write(opening)
        self._readers = [self._thread(self._read, stream) for stream in STREAMS]
        self._waiter = self._thread(self._wait)

    @property
    def process_id(self) -> int:
        """Process id, which is also the id of the process group."""
        return self._process.pid

    @property
    def has_exited(self) -> bool:
        return self._process.returncode is not None

    def send_signal(self, number: int) -> None:
        """Send a signal to the worker and everything it started; does nothing after its exit."""
        if self.has_exited:
            return
        if self._process.stdin is not None:
            self._write(str(int(number)))
        if self._process.stdin is None or number == signal.SIGKILL:
            self._signal_group(number)

    def join(self, timeout: float | None = None) -> bool:
        """Wait until the worker has exited and its output is complete; return whether it has."""
        self._waiter.join(timeout)
        return not self._waiter.is_alive()

    def text(self, stream: Stream) -> str:
        with self._changed:
            return "\n".join(self._lines[stream])

    def wait_for_output(self, text: str, timeout: float) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._is_complete or self._contains(text), timeout)
            return self._contains(text)

    def result(self) -> WorkerResult:
        return WorkerResult(
            index=self.index,
            exit_code=self._process.returncode,
            was_ended=self.was_ended,
            exited_at=self._exited_at,
            stdout=self.text("stdout"),
            stderr=self.text("stderr"),
            error_at=self._error_at,
        )

    def _write(self, line: str) -> None:
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):  # the process is gone
                self._process.stdin.write(f"{line}\n".encode())

    def _contains(self, text: str) -> bool:
        return any(text in line for lines in self._lines.values() for line in lines)

    def _thread(self, target: Callable[..., None], *arguments: object) -> threading.Thread:
        name = f"worker-{self.index}-{target.__name__}"
        thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
        thread.start()
        return thread

    def _read(self, stream: Stream) -> None:
        for line in output_lines(getattr(self._process, stream)):
            if line.is_final:
                text = strip_ansi(line.text)
                if stream == "stderr" and text.startswith(HEADINGS):
                    self._error_at = time.monotonic()
                with self._changed:
                    self._lines[stream].append(text)
                    self._changed.notify_all()
            self._on_line(self.index, stream, line)

    def _wait(self) -> None:
        self._process.wait()
        self._exited_at = time.monotonic()
        # Processes that the worker left running in its group would outlive the cluster.
        self._signal_group(signal.SIGKILL)
        for reader in self._readers:
            reader.join(_DRAIN_SECONDS)
        with self._changed:
            self._is_complete = True
            self._changed.notify_all()
        self._on_exit(self.index)

    def _signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process_id, number)


def _start(
    command: Sequence[str], environment: Mapping[str, str], cwd: str | None, has_input: bool
) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command,
            env=environment,
            cwd=cwd,
            stdin=subprocess.PIPE if has_input else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
    except OSError as error:
        raise ValueError(
            f"The worker's command cannot be started: {error}. Received: {list(command)}. Check "
            "the path and that it is executable."
        ) from error


@contextlib.contextmanager
def _affinity(cpus: Sequence[int] | None) -> Iterator[None]:
    """Bind this thread, from which a new process inherits it, and restore it afterwards."""
    if cpus is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
