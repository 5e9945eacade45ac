"""Starts consumer processes and collects what they got."""

from __future__ import annotations

import collections
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

PROGRAM = Path(__file__).parent / "program_consumer.py"
REPOSITORY = Path(__file__).parents[3]
TIMEOUT = 90


def child_environment() -> dict[str, str]:
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


class Consumer:
    """One process; `lines` and `epochs` fill while it runs."""

    def __init__(self, **settings) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), json.dumps(settings)],
            env=child_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.epochs: dict[int, list[int]] = collections.defaultdict(list)
        self.has_ended = False
        self._news = threading.Condition()
        self._is_ready = self._is_over = False
        self._batches = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.errors = ""
        self._error_reader = threading.Thread(target=self._read_errors, daemon=True)
        self._error_reader.start()

    @property
    def numbers(self) -> list[int]:
        return self.epochs[0]

    def wait_until_ready(self) -> None:
        self._wait_for(lambda: self._is_ready)

    def begin(self) -> None:
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def wait_for_batches(self, count: int) -> None:
        self._wait_for(lambda: self._batches >= count)

    def wait_for_end(self) -> None:
        self.process.wait(TIMEOUT)
        self._reader.join(TIMEOUT)
        assert self.has_ended, self.errors

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(TIMEOUT)
        self._reader.join(TIMEOUT)

    def _wait_for(self, condition) -> None:
        with self._news:
            assert self._news.wait_for(lambda: condition() or self._is_over, TIMEOUT)
        assert condition(), self.errors

    def _read(self) -> None:
        for line in self.process.stdout:
            with self._news:
                word, *numbers = line.split()
                if word == "READY":
                    self._is_ready = True
                elif word == "GOT":
                    self.epochs[int(numbers[0])] += map(int, numbers[1:])
                    self._batches += 1
                elif word == "END":
                    self.has_ended = True
                self._news.notify_all()
        with self._news:
            self._is_over = True
            self._news.notify_all()

    def _read_errors(self) -> None:
        for line in self.process.stderr:
            self.errors += line


def started_together(*consumers: Consumer) -> None:
    for consumer in consumers:
        consumer.wait_until_ready()
    for consumer in consumers:
        consumer.begin()
