"""Starts the fork server and the clusters that many tests look at, each once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from forked_workers import ForkServer, Workers, cluster_environments

# Of the whole session, whichever test comes first has to wait for it.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

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
