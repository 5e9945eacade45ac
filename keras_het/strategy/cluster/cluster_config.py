"""TF_CONFIG, read and checked before TensorFlow sees it, which hangs or fails far from the cause.

Standard library only. Reference:
https://www.tensorflow.org/guide/distributed_training#setting_up_the_tf_config_environment_variable
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keras_het.strategy.heterogeneous_strategy import HeterogeneousStrategy

TF_CONFIG = "TF_CONFIG"

_EXAMPLE = (
    '{"cluster": {"worker": ["host-a:12345", "host-b:12345"]}, '
    '"task": {"type": "worker", "index": 0}}'
)
_TOP_LEVEL_KEYS = ("cluster", "task", "rpc_layer", "environment", "session_master", "job")
_TASK_KEYS = ("type", "index", "trial", "cloud")
_JOBS = ("chief", "worker", "evaluator", "async", "ps", "summation")
_SINGLE_TASK_JOBS = ("chief", "evaluator")
# Tasks that are separate clusters as far as TensorFlow's collectives are concerned.
_LONE_JOBS = ("evaluator", "async", "ps", "summation")
SERVICE_ADDRESS = "KERAS_HET_SERVICE_ADDRESS"
GROUP_PROCESSES = "KERAS_HET_GROUP_PROCESSES"
"""Environment variable of async workers: process ids of the sync group, if all are on one host."""
CHOSEN_ROLES = "KERAS_HET_CHOSEN_ROLES"
"""Environment variable: the plan of roles with which this process was restarted."""
_ADDRESS = re.compile(r"(?:\[[^\s\[\]]+\]|[^\s:/\[\]]+):([0-9]{1,5})")
_MAXIMUM_PORT = 65535


# As in TensorFlow, an evaluator is a cluster of its own: one worker, and its chief. Async workers
# and parameter services are, too, but no chiefs.
@dataclass(frozen=True)
class ClusterConfig:
    """A validated cluster and the place of this process in it."""

    chief: str | None
    workers: tuple[str, ...]
    evaluator: str | None
    task_type: str
    task_index: int
    rpc_layer: str = "grpc"
    async_workers: tuple[str, ...] = ()
    parameter_services: tuple[str, ...] = ()
    summation_machines: tuple[str, ...] = ()

    @property
    def is_async_worker(self) -> bool:
        """Whether this process trains independently and exchanges with the parameter service."""
        return self.task_type == "async"

    @property
    def is_parameter_server(self) -> bool:
        """Whether this process holds the parameter service and does not train."""
        return self.task_type == "ps"

    @property
    def is_summation_machine(self) -> bool:
        """Whether this process sums gradients for the workers and does not train."""
        return self.task_type == "summation"

    def service_address(self, environ: Mapping[str, str] | None = None) -> str:
        given = (os.environ if environ is None else environ).get(SERVICE_ADDRESS, "")
        if given:
            return check_address(given, SERVICE_ADDRESS)
        if self.parameter_services:
            return self.parameter_services[0]
        host, _, port = (self.chief or self.workers[0]).rpartition(":")
        return f"{host}:{int(port) + 1}"

    def service_addresses(self, environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
        """Return the address of each task of the job `ps`; empty without that job."""
        if not self.parameter_services:
            return ()
        return (self.service_address(environ), *self.parameter_services[1:])

    @property
    def sync_group_addresses(self) -> tuple[str, ...]:
        """Addresses of the workers that train together, the chief first."""
        return (*((self.chief,) if self.chief else ()), *self.workers)

    @property
    def is_serving_only(self) -> bool:
        """Whether this process holds a part of the parameter service and runs no script."""
        return self.is_parameter_server and (self.has_sync_group or self.task_index > 0)

    @property
    def is_evaluator(self) -> bool:
        return self.task_type == "evaluator"

    @property
    def is_chief(self) -> bool:
        """Whether this process writes the shared files."""
        if self.is_parameter_server:
            return not self.is_serving_only
        return self.worker_index == 0 and self.task_type not in ("async", "summation")

    @property
    def has_sync_group(self) -> bool:
        """Whether any workers all-reduce; otherwise async workers train alone."""
        return bool(self.chief or self.workers)

    @property
    def num_workers(self) -> int:
        """Number of workers that train together: the chief and the job `worker`."""
        return 1 if self.task_type in _LONE_JOBS else len(self.sync_group_addresses)

    @property
    def worker_index(self) -> int:
        """Index of this process among the workers that train together, the chief first."""
        if self.task_type == "worker":
            return self.task_index + (self.chief is not None)
        return 0

    @property
    def task_name(self) -> str:
        """TensorFlow's name for this process, for example `/job:worker/replica:0/task:1`."""
        return f"/job:{self.task_type}/replica:0/task:{self.task_index}"

    def as_cluster_dict(self) -> dict[str, list[str]]:
        """Return job name -> addresses, in the form `tf.train.ClusterSpec` takes."""
        jobs = {
            "chief": [self.chief] if self.chief else [],
            "worker": list(self.workers),
            "evaluator": [self.evaluator] if self.evaluator else [],
            "async": list(self.async_workers),
            "ps": list(self.parameter_services),
            "summation": list(self.summation_machines),
        }
        return {job: addresses for job, addresses in jobs.items() if addresses}


def read_cluster_config(environ: Mapping[str, str] | None = None) -> ClusterConfig | None:
    text = (os.environ if environ is None else environ).get(TF_CONFIG, "")
    if not text.strip():
        return None
    config = _decode(text)
    _check_keys(config, _TOP_LEVEL_KEYS, "TF_CONFIG")
    cluster = config.get("cluster", {})
    if not isinstance(cluster, dict):
        raise ValueError(
            'TF_CONFIG\'s "cluster" must be an object from job names to lists of addresses. '
            f"Received: {cluster!r}. Expected for example {_EXAMPLE}"
        )
    if "cluster" not in config and "task" in config:
        raise ValueError(
            f'TF_CONFIG has a "task" but no "cluster". Received: keys {sorted(config)}. Add the '
            f"addresses of all workers, for example {_EXAMPLE}, or unset TF_CONFIG to train in "
            "one process."
        )
    if not cluster:
        return None
    jobs = {job: _read_job(job, addresses) for job, addresses in cluster.items()}
    _check_cluster(jobs)
    task_type, task_index = _read_task(config.get("task"), jobs)
    return ClusterConfig(
        chief=next(iter(jobs.get("chief", ())), None),
        workers=jobs.get("worker", ()),
        evaluator=next(iter(jobs.get("evaluator", ())), None),
        task_type=task_type,
        task_index=task_index,
        rpc_layer=config.get("rpc_layer") or "grpc",
        async_workers=jobs.get("async", ()),
        parameter_services=jobs.get("ps", ()),
        summation_machines=jobs.get("summation", ()),
    )


def config_of(strategy: HeterogeneousStrategy) -> ClusterConfig:
    """The configuration of a strategy with several tasks."""
    config = strategy.extended.cluster_config
    if config is None:
        raise ValueError(
            "This needs a cluster of several tasks. Received: a strategy of this process alone. "
            "Start the script on all machines with TF_CONFIG, or with `keras-het run`."
        )
    return config


def _decode(text: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(
            f"TF_CONFIG is not valid JSON: {error}. Received: TF_CONFIG={text[:500]!r}. JSON wants "
            "a closing bracket for each opening one, double quotes and no trailing comma. Expected "
            f"for example {_EXAMPLE}"
        ) from None
    if not isinstance(config, dict):
        raise ValueError(
            f"TF_CONFIG must be a JSON object. Received: {text!r} ({type(config).__name__}). "
            f"Expected for example {_EXAMPLE}"
        )
    return config


def _check_keys(received: dict[str, Any], known: tuple[str, ...], where: str) -> None:
    unknown = sorted(set(received) - set(known))
    if not unknown:
        return
    raise ValueError(
        f"{where} has unknown keys. Received: {unknown}; expected only {list(known)}. Correct or "
        f"remove them. An example: {_EXAMPLE}"
    )


def _check_cluster(jobs: dict[str, tuple[str, ...]]) -> None:
    seen: dict[str, str] = {}
    for job, addresses in jobs.items():
        for index, address in enumerate(addresses):
            place = f'"{job}" {index}'
            if address in seen:
                raise ValueError(
                    f"TF_CONFIG lists an address twice. Received: {address!r} for {seen[address]} "
                    f"and for {place}. Every task needs its own host:port; give one of them "
                    "another port."
                )
            seen[address] = place
    has_service = any(job in jobs for job in ("chief", "worker", "ps"))
    if "async" in jobs and not has_service:
        raise ValueError(
            'TF_CONFIG has a job "async" but nobody to exchange with. Received: jobs '
            f'{sorted(jobs)}. List the sync group in the job "worker", or for async workers alone '
            'a task in the job "ps", which runs the same script and holds the parameter service.'
        )
    if "ps" in jobs and "async" not in jobs:
        raise ValueError(
            'TF_CONFIG has a job "ps" and nobody who exchanges with it. Received: jobs '
            f'{sorted(jobs)}. List slow workers in the job "async", or remove "ps": '
            "HeterogeneousStrategy has no parameter servers for a sync group alone, and with "
            'roles="auto", which may find that nobody should be asynchronous, the sync group '
            "itself holds the parameter service."
        )


def _read_job(job: str, addresses: object) -> tuple[str, ...]:
    if job not in _JOBS:
        raise ValueError(
            f"TF_CONFIG's cluster has an unknown job. Received: {job!r}; expected only the jobs "
            f"{list(_JOBS)}. Rename or remove it."
        )
    if isinstance(addresses, dict):
        numbers = [str(index) for index in range(len(addresses))]
        addresses = [addresses.get(number) for number in numbers]
    if not isinstance(addresses, list):
        raise ValueError(
            f'TF_CONFIG\'s job "{job}" must be a list of addresses. Received: {addresses!r}. '
            f'Expected for example "{job}": ["host-a:12345"].'
        )
    if not addresses:
        raise ValueError(
            f'TF_CONFIG\'s job "{job}" has no address. Received: "{job}": []. List the '
            f'addresses host:port of its tasks, or remove "{job}" from "cluster".'
        )
    if job in _SINGLE_TASK_JOBS and len(addresses) > 1:
        raise ValueError(
            f'TF_CONFIG\'s job "{job}" may have one task only. Received: {len(addresses)} '
            f'addresses {addresses}. Keep one and move the others to "worker".'
        )
    return tuple(
        check_address(address, f'TF_CONFIG\'s job "{job}", task {index}')
        for index, address in enumerate(addresses)
    )


def _read_task(task: object, jobs: dict[str, tuple[str, ...]]) -> tuple[str, int]:
    if not isinstance(task, dict) or not task.keys() >= {"type", "index"}:
        raise ValueError(
            'TF_CONFIG\'s "task" must say which task this process is. Received: '
            f'"task": {task!r} and jobs {sorted(jobs)}. Expected for example '
            '"task": {"type": "worker", "index": 0}.'
        )
    _check_keys(task, _TASK_KEYS, 'TF_CONFIG\'s "task"')
    index = task["index"]
    # TensorFlow converts strings, and some schedulers rely on it.
    if isinstance(index, str) and index.isascii() and index.isdigit():
        index = int(index)
    if isinstance(index, bool) or not isinstance(index, int) or index < 0:
        raise ValueError(
            f'TF_CONFIG\'s "task" needs a whole number 0, 1, 2... as "index". Received: {index!r} '
            f"({type(index).__name__})."
        )
    task_type = task["type"]
    if not isinstance(task_type, str) or task_type not in (*jobs, "evaluator"):
        raise ValueError(
            f"TF_CONFIG's task type is not a job of its cluster. Received: type={task_type!r}, "
            f'cluster with the jobs {sorted(jobs)}. Correct the type or add the job to "cluster".'
        )
    num_tasks = 1 if task_type == "evaluator" else len(jobs[task_type])
    if index >= num_tasks:
        raise ValueError(
            f"TF_CONFIG's task index is out of range. Received: type={task_type!r}, "
            f"index={index}; expected 0 to {num_tasks - 1}, because the job has {num_tasks} "
            "task(s). Indices start at 0 in each job, so that a chief is not counted among the "
            "workers. Correct it, or list the missing address."
        )
    return task_type, index


def check_address(address: object, where: str) -> str:
    found = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
    if found is None or not 1 <= int(found[1]) <= _MAXIMUM_PORT:
        raise ValueError(
            f"{where} has a bad address. Received: {address!r}; expected 'host:port' as in "
            f"'host-a:12345' or '[::1]:12345', with a port from 1 to {_MAXIMUM_PORT} and no scheme."
        )
    return found[0]
