"""Starts the fork server and the clusters that many tests look at, each once."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from forked_workers import TIMEOUT, ForkServer, Workers, cluster_environments

from keras_het.launch.local.worker_process import WorkerProcess

# Of the whole session, whichever test comes first has to wait for it.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

FOLDER = Path(__file__).parent
StartWorkers = Callable[..., Workers]


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture(scope="session")
def start_for_session(
    fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StartWorkers]:
    """Starts workers that may be shared by tests."""
    yield from _starter(fork_server, lambda: tmp_path_factory.mktemp("cluster"))


@pytest.fixture
def start_workers(
    fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StartWorkers]:
    """Starts workers that end with the test, whatever happens."""
    yield from _starter(fork_server, lambda: tmp_path_factory.mktemp("cluster"))


@pytest.fixture
def launch() -> Iterator[Callable[..., WorkerProcess]]:
    """Starts `keras-het run` with a program of this folder; it ends with the test."""
    started: list[WorkerProcess] = []

    def run(script: str, options: Mapping[str, Any], *flags: str) -> WorkerProcess:
        command = [sys.executable, "-m", "keras_het", "run", "--workers", "2", *flags]
        process = WorkerProcess(
            0,
            [*command, str(FOLDER / script), json.dumps(options)],
            {**os.environ, "PYTHONUNBUFFERED": "1"},
            on_line=lambda index, stream, line: None,
            on_exit=lambda index: None,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.send_signal(signal.SIGKILL)
        process.join(TIMEOUT)


def _starter(server: ForkServer, new_folder: Callable[[], Path]) -> Iterator[StartWorkers]:
    started: list[Workers] = []

    def start(
        script: str,
        jobs: Mapping[str, int] | None = None,
        arguments: Sequence[Any] = (),
        environments: Sequence[Mapping[str, str]] | None = None,
        folder: Path | None = None,
    ) -> Workers:
        if environments is None:
            environments = cluster_environments(jobs) if jobs else [{}]
        workers = Workers(server, script, environments, folder or new_folder(), arguments)
        started.append(workers)
        return workers

    yield start
    for workers in started:
        workers.close()
