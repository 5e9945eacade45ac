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

from keras_het.launch.local.tracebacks import TracebackFolder
from keras_het.launch.local.worker_process import STREAMS, OutputLine, Stream, strip_ansi

_STYLES = ("cyan", "green", "magenta", "yellow", "blue", "bright_red")
_ERASE_LINE = "\r\x1b[2K"


class Display:
    """Printer of the workers' lines, in colour on a terminal and plain otherwise.

    A state of a progress bar is redrawn in place on a terminal and omitted otherwise. When a stream
    is closed (`| head`), its lines are dropped and the workers continue.
    """

    def __init__(
        self, stdout: TextIO, stderr: TextIO, only_chief: bool = False, tf_logs: bool = False
    ) -> None:
        files = zip(STREAMS, (stdout, stderr), strict=True)
        self._consoles = {s: Console(file=f, highlight=False, soft_wrap=True) for s, f in files}
        self._only_chief = only_chief
        self._lock = threading.Lock()
        self._folder = TracebackFolder(keep_logs=tf_logs)
        # The progress-bar state on the screen: its worker, its stream and the text.
        self._redrawn: tuple[int, Stream, Text] | None = None

    def show(self, worker_index: int, stream: Stream, line: OutputLine) -> None:
        if self._only_chief and worker_index != 0:
            return
        lines = [line]
        if stream == "stderr" and line.is_final:
            text = strip_ansi(line.text)
            with self._lock:
                shown = self._folder.feed(worker_index, text)
            if shown != [text]:
                lines = [OutputLine(each, True) for each in shown]
        for each in lines:
            self._show(worker_index, stream, each)

    def finish(self) -> None:
        """Show the retained lines of incomplete tracebacks; call it at the end."""
        with self._lock:
            rest = self._folder.finish()
        for worker_index, text in rest:
            self._show(worker_index, "stderr", OutputLine(text, True))

    def say(self, message: str, stream: Stream = "stderr") -> None:
        """Show the launcher's own message, each line after `[keras-het]`."""
        with self._lock:
            for line in message.splitlines():
                prefix = Text("[keras-het] ", style="bold")
                self._print(stream, Text.assemble(prefix, line), None)

    def _show(self, worker_index: int, stream: Stream, line: OutputLine) -> None:
        is_terminal = self._consoles[stream].is_terminal
        if not line.is_final and not is_terminal:
            return
        prefix = f"[worker {worker_index}] "
        if not is_terminal:
            with self._lock:
                # not a Text, whose tabs become spaces
                self._print(stream, prefix + strip_ansi(line.text), worker_index)
            return
        style = _STYLES[worker_index % len(_STYLES)]
        text = Text.assemble((prefix, style), Text.from_ansi(line.text))
        with self._lock:
            if line.is_final:
                self._print(stream, text, worker_index)
            else:
                self._redraw(worker_index, stream, text)

    def _print(self, stream: Stream, text: Text | str, worker_index: int | None) -> None:
        redrawn = self._redrawn
        if redrawn:
            self._write(redrawn[1], _ERASE_LINE)
        self._write(stream, text, "\n")
        # The last state of this worker's progress bar has just become this line.
        self._redrawn = None
        if redrawn and redrawn[0] != worker_index:
            self._redraw(*redrawn)

    def _redraw(self, worker_index: int, stream: Stream, text: Text) -> None:
        shown = text.copy()
        shown.truncate(self._consoles[stream].width - 1, overflow="ellipsis")
        other = self._redrawn[1] if self._redrawn else stream
        self._write(other, _ERASE_LINE)
        self._write(stream, shown)
        self._redrawn = (worker_index, stream, text)

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
    """Log `worker-N.log` of each worker: both streams, in the order in which lines arrive."""

    def __init__(self, directory: Path, indices: Iterable[int], label: str | None = None) -> None:
        self._lock = threading.Lock()
        self._failed: set[int] = set()
        self._files: dict[int, TextIO] = {}
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
        """Write one line, without colours; overwritten states of progress bars are omitted.

        After an error nothing more is written to that file, but the thread that reads the worker's
        output goes on: a worker with a full pipe would stall.
        """
        if not line.is_final:
            return
        with self._lock:
            file = self._files[worker_index]
            if file.closed or worker_index in self._failed:
                return
            try:
                file.write(strip_ansi(line.text) + "\n")
            except OSError as error:
                self._failed.add(worker_index)
                sys.stderr.write(
                    f"[keras-het] {file.name} is not written any more: {error}. Training goes on; "
                    "make room, or give another --log-dir the next time.\n"
                )

    def __enter__(self) -> "WorkerLogs":
        return self

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            for file in self._files.values():
                with contextlib.suppress(OSError):
                    file.close()
