"""Links between this node and the others, measured by the doctors that run on all of them."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from keras_het import __version__
from keras_het.keras_backend import KERAS_BACKEND, NEEDED_BACKEND
from keras_het.launch.doctor.addresses import reach
from keras_het.launch.doctor.cluster_checks import listening_tasks, other_tasks, own_task
from keras_het.launch.doctor.facts import Facts
from keras_het.launch.doctor.tensorflow_facts import answer_in
from keras_het.strategy.cluster.cluster_config import TF_CONFIG

_PROGRAM = "keras_het.launch.doctor.link_program"
_LONGEST_START_SECONDS = 120.0


@dataclasses.dataclass(frozen=True)
class Link:
    """What was measured from this node to another."""

    task: str
    address: str
    reached: str
    answers: bool = False
    refused: bool = False
    latency_seconds: float = 0.0
    call_seconds: float = 0.0
    bytes_per_second: float = 0.0
    clock_ahead_seconds: float = 0.0
    node: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What was measured from this node."""

    links: tuple[Link, ...] = ()
    waited_seconds: float = 0.0
    problem: str = ""


def describe_node(facts: Facts) -> dict[str, Any]:
    """Return what other nodes compare with themselves."""
    found = facts.tensorflow
    return {
        "host": facts.host,
        "keras_het": __version__,
        "tensorflow": found.tensorflow if found else "",
        "keras": found.keras if found else "",
        "device": "GPU" if found and found.replicas else "CPU",
        "replicas": max(1, found.replicas) if found else 1,
    }


def measure_links(facts: Facts, wait_seconds: float) -> Measurement:
    """Serve the doctors of the other nodes, and measure the links to them."""
    config, found = facts.cluster, facts.tensorflow
    others = other_tasks(config)
    if config is None or not others:
        return Measurement()
    if wait_seconds <= 0 or found is None or found.problem:
        return Measurement(_plain(others))
    request = {
        "cluster": config.as_cluster_dict(),
        "tasks": listening_tasks(config),
        "own": own_task(config),
        "node": describe_node(facts),
        "wait_seconds": wait_seconds,
    }
    measured, problem = _run(request, facts.environ, wait_seconds)
    if measured is None:
        return Measurement(_plain(others), problem=problem)
    links = [Link(task, address, **measured[task]) for task, address in others.items()]
    return Measurement(tuple(links), wait_seconds)


def _plain(others: Mapping[str, str]) -> tuple[Link, ...]:
    with ThreadPoolExecutor(16) as pool:  # each that is silent takes two seconds
        found = list(pool.map(reach, others.values()))
    return tuple(
        Link(task, address, reached, latency_seconds=seconds)
        for (task, address), (reached, seconds) in zip(others.items(), found, strict=True)
    )


def _run(
    request: Mapping[str, Any], environ: Mapping[str, str], wait_seconds: float
) -> tuple[dict[str, Any] | None, str]:
    """Measure in a process of its own: servers of TensorFlow live as long as their process."""
    given = {name: value for name, value in environ.items() if name != TF_CONFIG}
    fixed = {
        KERAS_BACKEND: NEEDED_BACKEND,
        "CUDA_VISIBLE_DEVICES": "-1",  # what is sent lies in host memory
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    try:
        ended = subprocess.run(
            [sys.executable, "-m", _PROGRAM],
            input=json.dumps(request),
            env={**given, **fixed},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=2 * wait_seconds + _LONGEST_START_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        return None, f"not done within {error.timeout:g} s"
    lines = [line for line in ended.stderr.splitlines() if line.strip()]
    last = lines[-1] if lines else f"exit code {ended.returncode}"
    return answer_in(ended.stdout), last
