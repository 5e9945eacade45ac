"""Which workers of a TF_CONFIG of several machines are this machine's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from keras_het.strategy.cluster.cluster_config import TF_CONFIG, ClusterConfig, read_cluster_config

_TYPES = ("worker", "async")


@dataclass(frozen=True)
class OwnWorkers:
    """This machine's workers.

    Args:
        first_index: number of the first one among the workers of all machines.
        tf_configs: TF_CONFIG of each.
        is_async: whether they train outside of the synchronous group.
    """

    first_index: int
    tf_configs: tuple[str, ...]
    is_async: bool


def own_workers(
    environ: Mapping[str, str], num_gpus: int, num_async_workers: int = 0
) -> OwnWorkers | None:
    """Return the workers that begin with the task of TF_CONFIG; None if it has no other machine.

    Raises:
        ValueError: if not exactly as many entries as GPUs are this machine's.
    """
    config = read_cluster_config(environ)
    if config is None or len({_host(each) for each in _addresses(config)}) < 2:
        return None
    if num_async_workers:
        raise ValueError(
            "TF_CONFIG says which workers of several machines are asynchronous. Received: "
            f"--async-workers {num_async_workers} too. Leave it out, and list them in the job "
            '"async".'
        )
    if config.task_type not in _TYPES:
        raise ValueError(
            f"workers of several machines are of the type worker or async. Received: TF_CONFIG "
            f"with task type {config.task_type!r}. List this machine's workers, one for each GPU, "
            'in the job "worker" and name the first of them as task.'
        )
    addresses = config.as_cluster_dict()[config.task_type]
    first = config.task_index
    host = _host(addresses[first])
    here = [index for index, each in enumerate(addresses) if _host(each) == host]
    expected = list(range(first, first + num_gpus))
    if here != expected:
        raise ValueError(_problem(config, here, expected))
    given = json.loads(environ[TF_CONFIG])
    texts = tuple(
        json.dumps({**given, "task": {**given["task"], "index": index}}) for index in here
    )
    if config.task_type == "async":
        return OwnWorkers(len(config.sync_group_addresses) + first, texts, True)
    return OwnWorkers(config.worker_index, texts, False)


def _addresses(config: ClusterConfig) -> list[str]:
    return [each for job in config.as_cluster_dict().values() for each in job]


def _host(address: str) -> str:
    return address.rpartition(":")[0]


def _problem(config: ClusterConfig, here: list[int], expected: list[int]) -> str:
    job = config.task_type
    addresses = config.as_cluster_dict()[job]
    host = _host(addresses[expected[0]])
    left = [f"{job} {index} ({addresses[index]})" for index in here if index not in expected]
    consequence = f" {', '.join(left)} would never start." if left else ""
    return (
        f"TF_CONFIG must list one {job} of this machine for each GPU, one after the other from its "
        f"task on.{consequence} Received: {len(expected)} GPU(s), task {job} {expected[0]} on "
        f'{host}, and in "cluster" the indices {here} on {host}; expected: {expected}. Correct '
        "the addresses on all machines, name this machine's first one as task, or choose other "
        "GPUs with --gpus."
    )
