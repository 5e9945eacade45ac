"""Processes that read from one disk, emulated by a file: their parts, and what becomes of them."""

from __future__ import annotations

import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "program_reader.py"
SECONDS = 110.0


class Readers:
    """Trainings in processes of their own, and the latest that each has said."""

    def __init__(self, folder):
        self._folder = folder
        self._processes = {}
        self._killed = set()
        self._lines = queue.Queue()
        self.loaders, self.parts = {}, {}

    def start(self, name, loaders, step_ms, io_budget):
        files = [str(self._folder / file) for file in ("loaders.json", "disk")]
        arguments = [*files, str(loaders), str(step_ms), str(io_budget)]
        process = subprocess.Popen(
            [sys.executable, PROGRAM, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._processes[name] = process
        threading.Thread(target=self._listen, args=(name, process), daemon=True).start()

    def kill(self, name):
        """Ends a training as a crash does."""
        self._killed.add(name)
        self._processes[name].send_signal(signal.SIGKILL)
        self._processes[name].wait(20)

    def _listen(self, name, process):
        for line in process.stdout:
            self._lines.put((name, *line.split()))
        self._lines.put((name, "0", "ended"))

    def wait_until(self, condition):
        """Listens until the condition holds, at most for as long as a test may take."""
        end = time.monotonic() + SECONDS
        while not condition():
            try:
                name, loaders, part = self._lines.get(timeout=max(end - time.monotonic(), 0.01))
            except queue.Empty:
                pytest.fail(f"not within {SECONDS} s: {self.loaders}, {self.parts}")
            if name in self._killed:
                continue
            if part == "ended":
                pytest.fail(f"{name} has ended: {self.loaders}, {self.parts}")
            self.loaders[name] = int(loaders)
            self.parts[name] = None if part == "None" else int(part)

    def close(self):
        for process in self._processes.values():
            process.kill()
            process.communicate(timeout=20)


@pytest.fixture
def readers(tmp_path):
    readers = Readers(tmp_path)
    yield readers
    readers.close()


@pytest.mark.full
def test_a_budget_is_divided_between_processes_and_returns(readers):
    """A slower device has less to read with; alone, it has all."""
    readers.start("fast", 8, 1.0, io_budget=10)
    readers.start("slow", 8, 5.0, io_budget=10)

    def is_divided():
        parts = [readers.parts.get(name) for name in ("fast", "slow")]
        if None in parts or sum(parts) != 10 or parts[0] <= parts[1]:
            return False
        return all(readers.loaders[name] <= readers.parts[name] for name in readers.parts)

    readers.wait_until(is_divided)
    readers.kill("fast")
    readers.wait_until(lambda: readers.parts["slow"] == 10)
