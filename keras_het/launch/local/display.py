"""Display of the workers' output: each line after `[worker N]`."""

import contextlib
import os
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.text import Text

from keras_het.launch.local.tracebacks import TracebackFilter
from keras_het.launch.local.worker_process import STREAMS, OutputLine, Stream, strip_ansi

_STYLES = ("cyan", "green", "magenta", "yellow", "blue", "bright_red")
_ERASE_LINE = "\r\x1b[2K"


class Display:
    """Printer of the workers' lines, in colour on a terminal and plain otherwise."""

    # When a stream is closed (`| head`), its lines are dropped and the workers continue.

    def __init__(
        self, stdout: TextIO, stderr: TextIO, only_chief: bool = False, tf_logs: bool = False
    ) -> None:
        files = zip(STREAMS, (stdout, stderr), strict=True)
        self._consoles = {s: Console(file=f, highlight=False, soft_wrap=True) for s, f in files}
        self._only_chief = only_chief
        self._lock = threading.Lock()
        self.tracebacks = TracebackFilter(keep_logs=tf_logs)
        # The stream whose last line on the terminal is the state of a progress bar.
        self._unfinished: Stream | None = None

    def show(self, worker_index: int, stream: Stream, line: OutputLine) -> None:
        console = self._consoles[stream]
        plain = strip_ansi(line.text)
        if self._only_chief and worker_index != 0:
            return
        with self._lock:
            if not line.is_final and not console.is_terminal:
                return
            is_error = stream == "stderr" and line.is_final
            if is_error and not self.tracebacks.shows(worker_index, plain):
                return
            prefix = f"[worker {worker_index}] "
            if not console.is_terminal:
                self._print(stream, prefix + plain)  # not a Text, whose tabs become spaces
                return
            style = _STYLES[worker_index % len(_STYLES)]
            text = Text.assemble((prefix, style), Text.from_ansi(line.text))
            if not line.is_final:
                text.truncate(console.width - 1, overflow="ellipsis")
            self._print(stream, text, line.is_final)

    def say(self, message: str, stream: Stream = "stderr") -> None:
        """Show the launcher's own message, each line after `[keras-het]`."""
        with self._lock:
            for line in message.splitlines():
                self._print(stream, Text.assemble(("[keras-het] ", "bold"), line))

    def _print(self, stream: Stream, text: Text | str, is_final: bool = True) -> None:
        if self._unfinished:
            self._write(self._unfinished, _ERASE_LINE)
        self._write(stream, text, "\n" if is_final else "")
        self._unfinished = None if is_final else stream

    def _write(self, stream: Stream, text: Text | str, end: str = "") -> None:
        console = self._consoles[stream]
        if isinstance(text, Text):
            # Rendered separately because rich's own print exits the program when a pipe is closed.
            with console.capture() as rendered:
                console.print(text, end="")
            text = rendered.get()
        try:
            console.file.write(printable(text + end, console.file))
            console.file.flush()
        except OSError:
            discard(console.file)


def printable(text: str, stream: object) -> str:
    """Replace characters that a stream's encoding has not: an error would end who writes it."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "replace").decode(encoding)


def discard(stream: object) -> None:
    """Discard pending writes to a closed pipe, as Python's documentation advises."""
    fileno = getattr(stream, "fileno", None)
    if fileno is None:
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, fileno())
    os.close(nowhere)


class WorkerLogs:
    """Log `worker-N.log` of each worker, none without a directory: both streams, as they arrive."""

    def __init__(
        self, directory: Path | None, indices: Iterable[int], label: str | None = None
    ) -> None:
        self._lock = threading.Lock()
        self._files: dict[int, TextIO] = {}
        if directory is None:
            return
        try:
            directory.mkdir(parents=True, exist_ok=True)
            for index in indices:
                path = directory / f"worker-{index}.log"
                self._files[index] = path.open("w", encoding="utf-8", buffering=1)
        except OSError as error:
            raise ValueError(
                f"The workers' logs cannot be written to {str(directory)!r}: {error}. Give a "
                "--log-dir where you may create files."
            ) from error
        for file in self._files.values():
            file.write(f"{label}\n" if label else "")

    def write(self, worker_index: int, line: OutputLine) -> None:
        """Write one line, without colours; overwritten states of progress bars are omitted."""
        # After an error the output is still read: a worker with a full pipe would stall.
        with self._lock:
            file = self._files.get(worker_index)
            if file is None or not line.is_final:
                return
            try:
                file.write(strip_ansi(line.text) + "\n")
            except OSError as error:
                self._close(worker_index)
                sys.stderr.write(
                    f"[keras-het] {file.name} is no longer written: {error}. Training continues; "
                    "free some space, or give another --log-dir next time.\n"
                )

    def _close(self, worker_index: int) -> None:
        with contextlib.suppress(OSError):
            self._files.pop(worker_index).close()

    def __enter__(self) -> "WorkerLogs":
        return self

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            for worker_index in list(self._files):
                self._close(worker_index)
