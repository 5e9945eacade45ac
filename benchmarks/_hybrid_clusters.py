"""Clusters of the hybrid benchmarks: local, on hosts with limited links, or async only."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from _hybrid_training import TIMEOUT_SECONDS

QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}


@contextlib.contextmanager
def local_cluster(command: list[str], emulation: Any, num_async: int) -> Iterator[Any]:
    """Run workers on the loopback; yield the cluster, whose `wait` raises the workers' errors."""
    from keras_het.launch.local.local_cluster import LocalCluster

    cluster = LocalCluster(
        command,
        num_async_workers=num_async,
        emulation=emulation,
        env={**QUIET, **_secret()},
        keep_lines=100,
    )
    with cluster:
        yield cluster


def wait_for_local(cluster: Any) -> None:
    """Wait until all workers of a local cluster have ended.

    Raises:
        RuntimeError: if one failed.
    """
    from keras_het.launch.local.failure_report import describe_failures

    results = cluster.wait(timeout=TIMEOUT_SECONDS)
    if cluster.failures:
        raise RuntimeError(describe_failures(results))


@contextlib.contextmanager
def cluster_on_hosts(
    command: list[str], emulation: Any, num_async: int, hosts: Any
) -> Iterator[Callable[[], None]]:
    """Run workers on hosts with limited links; yield a function that waits for them."""
    from keras_het.launch.local.worker_environment import service_environment, worker_environment

    addresses = [f"{hosts.address(index)}:4000" for index in range(len(emulation.speeds))]
    service = service_environment(f"{hosts.address(0)}:4100", os.environ)
    common = {**os.environ, **QUIET, "no_proxy": "*", **service}
    environments = [
        worker_environment(index, addresses, 1, common, emulation, num_async)
        for index in range(len(addresses))
    ]
    commands = [hosts.command(index, command) for index in range(len(addresses))]
    with _processes(commands, environments) as processes:
        yield lambda: _wait_for_all(processes)


@contextlib.contextmanager
def served_cluster(command: list[str], emulation: Any, num_async: int) -> Iterator[Any]:
    """Run workers on the loopback, and `keras-het parameter-server`, whose process is yielded."""
    from keras_het.launch.local.free_ports import ReservedPorts
    from keras_het.launch.local.worker_environment import worker_environment

    number = len(emulation.speeds)
    ports = ReservedPorts(number + 1)
    ports.close()
    addresses = list(ports.addresses)
    common = {**os.environ, **QUIET, "no_proxy": "*", **_secret()}
    environments = []
    for index in range(number):
        own = worker_environment(index, addresses[:-1], 1, common, emulation, num_async)
        config = json.loads(own["TF_CONFIG"])
        config["cluster"]["ps"] = addresses[-1:]
        environments.append({**own, "TF_CONFIG": json.dumps(config)})
    config["task"] = {"type": "ps", "index": 0}
    environments.append({**common, "TF_CONFIG": json.dumps(config)})
    serve = [sys.executable, "-m", "keras_het", "parameter-server"]
    commands = [*[command] * number, serve]
    with _processes(commands, environments) as processes:
        yield processes[-1]


@contextlib.contextmanager
def async_cluster(
    command: list[str], emulation: Any, hosts: Any = None
) -> Iterator[Callable[[], None]]:
    """Run all workers asynchronously, and a task with the center; yield a function that waits."""
    from keras_het.launch.local.free_ports import ReservedPorts
    from keras_het.launch.local.worker_environment import worker_environment

    number = len(emulation.speeds)
    ports = ReservedPorts(number + 1)
    ports.close()
    addresses = list(ports.addresses)
    if hosts is not None:  # the center runs on the first one
        addresses = [f"{hosts.address(index)}:4000" for index in range(number)]
        addresses.append(f"{hosts.address(0)}:4100")
    common = {**os.environ, **QUIET, "no_proxy": "*", **_secret()}
    cluster = {"ps": addresses[-1:], "async": addresses[:-1]}
    environments = []
    for index in range(number + 1):
        is_center = index == number
        task = {"type": "ps" if is_center else "async", "index": 0 if is_center else index}
        own = worker_environment(0 if is_center else index, addresses[:-1], 1, common, emulation)
        environments.append({**own, "TF_CONFIG": json.dumps({"cluster": cluster, "task": task})})
    commands = [command] * (number + 1)
    if hosts is not None:
        commands = [hosts.command(index % number, command) for index in range(number + 1)]
    with _processes(commands, environments) as processes:
        yield lambda: _wait_for_all(processes)


def _secret() -> dict[str, str]:
    """Return the secret of all tasks, unless one is given the address of the service."""
    from keras_het.launch.local.worker_environment import service_environment
    from keras_het.strategy.cluster.cluster_config import SERVICE_ADDRESS

    found = service_environment("", os.environ)
    return {name: value for name, value in found.items() if name != SERVICE_ADDRESS}


@contextlib.contextmanager
def _processes(
    commands: Sequence[list[str]], environments: Sequence[dict[str, str]]
) -> Iterator[list[Any]]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes: list[Any] = []
    try:
        for command, environment in zip(commands, environments, strict=True):
            processes.append(subprocess.Popen(command, env=environment, **pipes))  # type: ignore[call-overload]
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _wait_for_all(processes: Sequence[Any]) -> None:
    for process in processes:
        output, _ = process.communicate(timeout=TIMEOUT_SECONDS)
        if process.returncode:
            raise RuntimeError(f"a worker failed:\n{output[-3000:]}")
