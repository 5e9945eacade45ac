"""Clusters of forked workers: started from a script, watched, and always ended."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from keras_het.launch.local.free_ports import HOST, ReservedPorts

FOLDER = Path(__file__).parent
# Everything here ends much sooner; a loaded machine may need long.
TIMEOUT = 240.0


class ForkServer:
    """Client of `fork_server.py`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        # By the numbers of workers: a process id may be that of several, one after the other.
        self._process_ids: dict[int, int] = {}
        self._exit_codes: dict[int, int] = {}
        self._numbers = itertools.count()
        self._is_ready = False
        self._requests = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, str(FOLDER / "fork_server.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Workers import what tests import: `pythonpath` of pytest's settings.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def fork(self, script: str, arguments: Sequence[str], **request: Any) -> int:
        """Starts a worker and returns its number."""
        self._wait_for(lambda: self._is_ready, TIMEOUT, "the fork server to import TensorFlow")
        number = next(self._numbers)
        about = {"number": number, "script": script, "arguments": list(arguments), **request}
        with self._requests:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(about).encode() + b"\n")
            self._process.stdin.flush()
        self._wait_for(lambda: number in self._process_ids, TIMEOUT, "a worker to start")
        return number

    def ended(self, number: int, timeout: float) -> int | None:
        """Exit code of a worker, or None if it still runs."""
        with self._changed:
            self._changed.wait_for(lambda: number in self._exit_codes, timeout)
            return self._exit_codes.get(number)

    def send_signal(self, number: int, signal_number: int) -> None:
        """Sends a signal to a worker, unless it has ended."""
        if self.ended(number, timeout=0) is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process_ids[number], signal_number)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        self._reader.join(10)

    def _wait_for(self, condition: Callable[[], bool], timeout: float, what: str) -> None:
        with self._changed:
            if not self._changed.wait_for(condition, timeout):
                raise TimeoutError(f"waited {timeout:g} s for {what}")

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = json.loads(line)
            with self._changed:
                if "started" in message:
                    self._process_ids[message["started"]] = message["process_id"]
                elif "ended" in message:
                    self._exit_codes[message["ended"]] = message["exit_code"]
                else:
                    self._is_ready = True
                self._changed.notify_all()


@dataclasses.dataclass(frozen=True)
class Result:
    """How a worker ended."""

    exit_code: int
    output: str


class Workers:
    """Several workers that run one script.

    Args:
        server: where they are forked.
        script: name of a script in this folder.
        environments: variables of each worker, besides those of this process.
        folder: a fresh folder for their output; each worker's working directory is in it.
        arguments: arguments of the script.
    """

    def __init__(
        self,
        server: ForkServer,
        script: str,
        environments: Sequence[Mapping[str, str]],
        folder: Path,
        arguments: Sequence[object] = (),
    ) -> None:
        self._server = server
        self._numbers: list[int] = []
        self.folders = [folder / f"worker_{index}" for index in range(len(environments))]
        self._outputs = [folder / f"output_{index}.txt" for index in range(len(environments))]
        try:
            for index, environment in enumerate(environments):
                self.folders[index].mkdir(parents=True)
                self._numbers.append(
                    server.fork(
                        str(FOLDER / script),
                        [str(argument) for argument in arguments],
                        environment={**os.environ, **environment},
                        folder=str(self.folders[index]),
                        output=str(self._outputs[index]),
                    )
                )
        except BaseException:
            self.close()
            raise

    def output(self, index: int) -> str:
        path = self._outputs[index]
        return path.read_text(errors="replace") if path.exists() else ""

    def wait(self, timeout: float = TIMEOUT) -> list[Result]:
        """Waits for all workers."""
        return [self.wait_for(index, timeout) for index in range(len(self._numbers))]

    def wait_for(self, index: int, timeout: float = TIMEOUT) -> Result:
        ended = self._server.ended(self._numbers[index], timeout)
        if ended is None:
            raise TimeoutError(f"worker {index} still runs after {timeout:g} s:\n{self.tails()}")
        return Result(ended, self.output(index))

    def wait_for_output(self, index: int, text: str, timeout: float = TIMEOUT) -> None:
        """Waits until a worker has printed a text."""
        end = time.monotonic() + timeout
        while text not in self.output(index):
            ended = self._server.ended(self._numbers[index], timeout=0.05)
            if ended is not None and text not in self.output(index):
                how = f"exit code {ended}, without {text!r}"
                raise AssertionError(f"worker {index} ended, {how}:\n{self.tails()}")
            if time.monotonic() > end:
                raise TimeoutError(f"no {text!r} of worker {index}:\n{self.tails()}")

    def wait_for_outputs(self, indices: Sequence[int], text: str) -> None:
        """Waits until each of some workers has printed a text, before any of them needs to end."""
        for index in indices:
            self.wait_for_output(index, text)

    def send_signal(self, index: int, number: int = signal.SIGKILL) -> None:
        self._server.send_signal(self._numbers[index], number)

    def tails(self) -> str:
        return "\n".join(
            f"--- worker {index}:\n{self.output(index)[-3000:]}"
            for index in range(len(self._numbers))
        )

    def close(self) -> None:
        """Kills what still runs."""
        for index in range(len(self._numbers)):
            self.send_signal(index, signal.SIGKILL)
        for number in self._numbers:
            self._server.ended(number, timeout=20)


def cluster_environments(
    jobs: Mapping[str, int],
    common: Mapping[str, str] | None = None,
    hosts: Sequence[str] | None = None,
) -> list[dict[str, str]]:
    """TF_CONFIG of every task of a cluster on free ports; `jobs` maps names to numbers of tasks.

    Tasks may have addresses of different hosts, all of this machine.
    """
    tasks = [(job, index) for job, count in jobs.items() for index in range(count)]
    ports = ReservedPorts(len(tasks))
    ports.release()
    names = hosts or [HOST] * len(tasks)
    addresses = {
        task: f"{name}:{port}" for task, name, port in zip(tasks, names, ports.ports, strict=True)
    }
    cluster = {job: [addresses[job, index] for index in range(n)] for job, n in jobs.items()}
    ports.close()
    return [
        {
            **(common or {}),
            "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": job, "index": index}}),
        }
        for job, index in tasks
    ]
