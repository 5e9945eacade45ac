"""One log file per worker."""

import contextlib
import sys
import threading
from pathlib import Path
from typing import TextIO

from keras_het.launch.local.line_splitter import OutputLine, strip_ansi
from keras_het.launch.local.worker_process import Stream


class WorkerLogs:
    """Log `worker-N.log` of each worker: both streams, in the order in which lines arrive."""

    def __init__(self, directory: Path, num_workers: int, label: str | None = None) -> None:
        self._lock = threading.Lock()
        self._failed: set[int] = set()
        self._files: list[TextIO] = []
        try:
            directory.mkdir(parents=True, exist_ok=True)
            for index in range(num_workers):
                path = directory / f"worker-{index}.log"
                self._files.append(path.open("w", encoding="utf-8", buffering=1))
        except OSError as error:
            raise ValueError(
                f"The workers' logs cannot be written to {str(directory)!r}: {error}. Give a "
                "--log-dir where you may create files."
            ) from error
        for file in self._files:
            file.write(f"{label}\n" if label else "")

    def write(self, worker_index: int, stream: Stream, line: OutputLine) -> None:
        """Write one line, without colours; overwritten states of progress bars are omitted.

        After an error, for example because of a full disk, nothing more is written to that file.
        The thread that reads the worker's output continues: a worker with a full pipe would stall.
        """
        del stream
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
            for file in self._files:
                with contextlib.suppress(OSError):
                    file.close()
