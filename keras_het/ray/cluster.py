"""The cluster that the workers of Ray Train form: addresses, groups and devices."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray._private import ray_logging
from ray.train.backend import Backend, BackendConfig

from keras_het.launch.local.tracebacks import TracebackFilter
from keras_het.launch.local.worker_environment import (
    QUIET_TENSORFLOW,
    environment_of,
    present_gpus,
    service_environment,
    worker_environment,
)
from keras_het.ray.group import OnWorker
from keras_het.telemetry.hardware import NvmlMissingError
from keras_het.usable_cpus import usable_cpus

ROLE_LABEL, ASYNC = "keras-het-role", "async"
NO_GPU = "-1"


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a worker is."""

    # The service is beside a worker that becomes its leader; without `gpus`, Ray has chosen one.

    node: str
    address: str
    service_address: str
    is_async: bool
    gpus: tuple[str, ...] | None
    cpus: int


def environments(places: Sequence[Place], threads: int | None) -> list[dict[str, str]]:
    """Return the variables of each worker."""
    # A worker that has asked Ray for no GPU takes that of its place among the workers of its node.
    # `threads`: of each worker, None to deal out the CPUs of a node.
    order = sorted(range(len(places)), key=lambda worker: places[worker].is_async)
    num_async = sum(place.is_async for place in places)
    if num_async == len(places):
        raise ValueError(
            f"no worker is left for the synchronous group. Received: {num_async} worker(s), all on "
            f"nodes with the label {ROLE_LABEL}={ASYNC}. Start a node without that label."
        )
    addresses = [places[worker].address for worker in order]
    leader = places[order[0]]
    service = service_environment(leader.service_address, {}) if num_async else {}
    num_on_node = Counter(place.node for place in places)
    of_node: Counter[str] = Counter()
    found: list[dict[str, str]] = [{} for _ in places]
    for index, worker in enumerate(order):
        place = places[worker]
        found[worker] = worker_environment(
            index,
            addresses,
            threads or max(1, place.cpus // num_on_node[place.node]),
            {**QUIET_TENSORFLOW, **service},
            num_async_workers=num_async,
        )
    for variables, place in zip(found, places, strict=True):
        if place.gpus is not None:
            own = place.gpus[of_node[place.node] :][:1] or (NO_GPU,)
            variables.update(environment_of(*own))
            of_node[place.node] += 1
    return found


class Cluster(Backend):
    """Sets the variables of each worker before its training function begins."""

    def on_start(self, worker_group: Any, backend_config: ClusterConfig) -> None:
        places = worker_group.execute(_find_place)
        ray.get(
            [
                worker_group.execute_single_async(worker, _set_variables, variables)
                for worker, variables in enumerate(environments(places, backend_config.threads))
            ]
        )


@dataclasses.dataclass
class ClusterConfig(BackendConfig):
    """Configuration of `Cluster`; without `threads` the CPUs of a node are dealt out."""

    threads: int | None = None
    progress: Any = None
    run: str = ""

    @property
    def backend_cls(self) -> type[Backend]:
        return Cluster

    @property
    def train_func_context(self) -> Callable[[], OnWorker]:
        return functools.partial(OnWorker, self.progress, self.run)


def _find_place() -> Place:
    context = ray.get_runtime_context()
    node = context.get_node_id()
    labels: dict[str, str] = next(
        (each["Labels"] for each in ray.nodes() if each["NodeID"] == node), {}
    )
    host = ray.util.get_node_ip_address()
    with socket.socket() as one, socket.socket() as another:
        for free in (one, another):
            free.bind((host, 0))
        ports = one.getsockname()[1], another.getsockname()[1]
    address, service_address = (f"{host}:{port}" for port in ports)
    is_given = bool(context.get_accelerator_ids().get("GPU"))
    is_async = labels.get(ROLE_LABEL) == ASYNC
    gpus = None if is_given else _gpus()
    return Place(node, address, service_address, is_async, gpus, int(usable_cpus()))


def _gpus() -> tuple[str, ...]:
    try:
        return tuple(present_gpus({}))
    except NvmlMissingError:
        return ()


def _set_variables(variables: dict[str, str]) -> None:
    ours = ("TF_CONFIG", "CUDA_VISIBLE_DEVICES")
    os.environ.update(
        {name: text for name, text in variables.items() if name in ours or name not in os.environ}
    )


Batch = Mapping[str, Any]

_HANDLER = "ray_print_logs"
_WORKER, _CONTROLLER = "RayTrainWorker", "TrainController"
# Ray Train's other processes; their log files have what they say.
_HELPERS = ("PlacementGroupCleaner", "PreemptionWatcher", "SynchronizationActor", "TrainStateActor")
_STARTED = "Started training worker group"
# How a group comes to be, before the line above, and Ray's C++ code about itself.
_ROUTINE = re.compile(
    r"Requesting resources|Detected ready resources|Attempting to start|Did not detect any changes"
    r"|- \(ip=|\[\d{4}-\d\d-\d\d [\d:,]+ [A-Z] \d+ \d+\] "
)


class EachOnce:
    """Filter of the lines that Ray shows, without what Ray Train repeats and TensorFlow logs."""

    def __init__(self, show: Callable[[Batch], None]) -> None:
        self._show = show
        self._workers, self._controllers = TracebackFilter(), TracebackFilter(shown=-1)
        self._said: set[str] = set()

    def __call__(self, batch: Batch) -> None:
        lines = [kept for line in batch["lines"] for kept in self._kept(batch, line)]
        if lines:
            self._show({**batch, "lines": lines})

    def _kept(self, batch: Batch, line: str) -> list[str]:
        actor = batch.get("actor_name")
        if actor in _HELPERS:
            return []
        if actor not in (_WORKER, _CONTROLLER) or not batch["is_err"]:
            return [line]
        process = int(batch["pid"])
        if actor == _WORKER:
            return [line] * self._workers.shows(process, line)
        is_news = self._controllers.shows(process, line) and line not in self._said
        is_shown = is_news and not _ROUTINE.match(line)
        self._said.add(line)
        if line.startswith(_STARTED):  # what comes next is said of another group
            self._said.clear()
            self._workers = TracebackFilter()
        return [line] * is_shown


def shorten_log() -> None:
    """Shorten what Ray prints in this process from now on, also after a training has ended."""
    dispatcher = ray_logging.global_worker_stdstream_dispatcher
    show = dict(dispatcher.handlers).get(_HANDLER)
    # without one the program has asked Ray for silence
    if show is not None and not isinstance(show, EachOnce):
        dispatcher.remove_handler(_HANDLER)
        dispatcher.add_handler(_HANDLER, EachOnce(show))
