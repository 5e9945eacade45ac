"""The workers that a scheduler starts, and which of them this process is, from its variables.

Functions of an environment only. Nothing is asked of a network: where the variables do not tell
every address, a list of hosts is needed.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from keras_het.strategy.cluster.cluster_config import TF_CONFIG, read_cluster_config

PORT = 12345
SLURM = "Slurm"
# The parameter service answers one port above that of the first worker.
_PORTS_OF_A_WORKER = 2
# Without these lengths a slip of the keyboard would take all memory.
_PART = re.compile(r"(?P<name>(?:[^,:\[\]]|\[[^\[\]]*\])+)(?::(?P<slots>0*[1-9]\d{0,5}))?")
_BRACKETS = re.compile(r"(\[[^\[\]]*\])")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
_RANGE = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")
_COMPONENT = "SLURM_JOB_NODELIST_HET_GROUP_"
_TASKS = re.compile(r"(\d{1,9})(?:\(x(\d{1,9})\))?")
# Variables of a process's rank, of the number of processes and of the rank on its host.
_RANKS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("PET_NODE_RANK", "PET_NNODES", ""),
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
)
# More are a slip of the keyboard.
_MOST_HOSTS = 100_000
_HOW_TO_LIST = "list the hosts of all workers with --hosts"


@dataclass(frozen=True)
class Place:
    """The host of each worker, which of them this process is, and who says so."""

    hosts: tuple[str, ...]
    index: int
    source: str

    def addresses(self, port: int) -> list[str]:
        """Return `host:port` of each worker, with ports that count up on each host."""
        before = [self.hosts[:index].count(host) for index, host in enumerate(self.hosts)]
        pairs = zip(self.hosts, before, strict=True)
        return [f"{host}:{port + _PORTS_OF_A_WORKER * number}" for host, number in pairs]

    def with_workers(self, number: int) -> Place:
        """Return the place of the first of so many workers of each process."""
        hosts = tuple(host for host in self.hosts for _ in range(number))
        return replace(self, hosts=hosts, index=number * self.index)


def place_of(
    environ: Mapping[str, str],
    hosts: Sequence[str] = (),
    hostname: str = "",
    is_alone_on_host: bool = False,
) -> Place:
    """Return this process's place among `hosts`, or among those that the environment tells."""
    # `is_alone_on_host`: one process stands for all workers of its host in the list.
    if hosts:
        return Place(tuple(hosts), _index(environ, hosts, hostname, is_alone_on_host), "--hosts")
    if "SLURM_STEP_NODELIST" in environ:
        return _place_in_slurm(environ)
    if "PET_MASTER_ADDR" in environ:
        return _place_in_kubeflow(environ)
    raise ValueError(_unknown(environ))


def read_hosts(text: str) -> list[str]:
    """Return the host of each worker, from a file or a text such as `a,b:2,node[01-03].example`."""
    if os.path.isfile(text):  # noqa: PTH113 - which raises no error for names that are too long
        try:
            content = Path(text).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ValueError(
                f"The hosts file is not UTF-8 text. Received: {text!r}. Save it as UTF-8."
            ) from None
        lines = [line.partition("#")[0].strip() for line in content.splitlines()]
        text = ",".join(re.sub(r"\s+slots=", ":", line) for line in lines if line)
    elif "/" in text:
        raise ValueError(f"There is no hosts file {text!r}. Correct the path, or list hosts.")
    found = expand_hosts(text)
    if not found or not all(map(_NAME.fullmatch, found)):
        raise _unreadable(text)
    return found


def expand_hosts(hosts: str) -> list[str]:
    """Return the names that Slurm writes as `n[1-2,10],m5`, in their order; `m5:2` stands twice."""
    parts = list(_PART.finditer(hosts))
    if ",".join(part[0] for part in parts) != hosts:
        raise _unreadable(hosts)
    names = (
        "".join(pieces)
        for part in parts
        # names and ranges alternate
        for pieces in itertools.product(*map(_choices, _BRACKETS.split(part["name"])))
        for _ in range(int(part["slots"] or 1))
    )
    return _at_most(names, hosts)


def _at_most(hosts: Iterable[str], text: str) -> list[str]:
    found = list(itertools.islice(hosts, _MOST_HOSTS + 1))
    if len(found) > _MOST_HOSTS:
        raise _unreadable(text)
    return found


def _choices(piece: str) -> list[str]:
    """Return what a piece of a name stands for: itself, or the numbers of ranges in brackets."""
    if not piece.startswith("["):
        return [piece]
    found: list[str] = []
    for each in piece[1:-1].split(","):
        bounds = _RANGE.fullmatch(each)
        if bounds is None or int(bounds[2] or bounds[1]) < int(bounds[1]):
            raise _unreadable(piece)
        width, numbers = len(bounds[1]), range(int(bounds[1]), int(bounds[2] or bounds[1]) + 1)
        found += [f"{number:0{width}}" for number in numbers]
    return found


def _unreadable(hosts: str) -> ValueError:
    return ValueError(
        f"These are not valid hosts. Received: {hosts!r}; expected: a file with `host [slots=N]` "
        "in each line, or hosts with commas, such as a,b:2,node[01-03], where :2 stands for two "
        f"workers, at most {_MOST_HOSTS:,} in all. Correct them; what else ssh needs to reach a "
        "host belongs in ~/.ssh/config."
    )


def _place_in_slurm(environ: Mapping[str, str]) -> Place:
    """Find the place by the node's name and the task's number on it."""
    # Nodes of a heterogeneous job are sorted by name; here its components stand one after the
    # other, so that the last one can be asynchronous.
    nodes = expand_hosts(environ["SLURM_STEP_NODELIST"])
    numbers: list[int] = []
    for each in _text(environ, "SLURM_STEP_TASKS_PER_NODE").split(","):
        found = _TASKS.fullmatch(each)
        if found is None:
            raise _broken(environ, "SLURM_STEP_TASKS_PER_NODE", "such as 2(x3),1")
        numbers += [int(found[1])] * min(int(found[2] or 1), len(nodes) + 1)
    own, local = _text(environ, "SLURMD_NODENAME"), _number(environ, "SLURM_LOCALID")
    if len(numbers) != len(nodes) or own not in nodes or local >= numbers[nodes.index(own)]:
        names = ("SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE", "SLURMD_NODENAME")
        received = ", ".join(f"{name}={environ[name]}" for name in (*names, "SLURM_LOCALID"))
        raise ValueError(
            f"Slurm's variables contradict each other. Received: {received}. Were they set by "
            f"hand, or for another step? Unset them, or {_HOW_TO_LIST}."
        )
    component = {
        node: int(name.removeprefix(_COMPONENT))
        for name in environ
        if name.startswith(_COMPONENT)
        for node in expand_hosts(environ[name])
    }
    pairs = sorted(zip(nodes, numbers, strict=True), key=lambda pair: component.get(pair[0], 0))
    each_task = (node for node, number in pairs for _ in range(number))
    hosts = tuple(_at_most(each_task, environ["SLURM_STEP_TASKS_PER_NODE"]))
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if name in environ and _number(environ, name) != len(hosts):
            raise ValueError(
                "Slurm and MPI disagree on the number of processes. Received: SLURM_STEP_NUM_TASKS "
                f"for {len(hosts)}, {name}={environ[name]}; expected: the same. Start the workers "
                f"with srun instead of mpirun, or {_HOW_TO_LIST}."
            )
    return Place(hosts, hosts.index(own) + local, SLURM)


def _place_in_kubeflow(environ: Mapping[str, str]) -> Place:
    """Name the pods of a TrainJob after the first one, `NAME-node-0-0.NAME`."""
    first, rank = environ["PET_MASTER_ADDR"], _number(environ, "PET_NODE_RANK")
    number = _number(environ, "PET_NNODES")
    pod, dot, domain = first.partition(".")
    name, _, ordinal = pod.rpartition("-")
    if not name or ordinal != "0" or rank >= number:
        raise ValueError(
            "PET_MASTER_ADDR, PET_NODE_RANK and PET_NNODES do not give the names of all pods. "
            f"Received: {first!r}, {rank}, {number}; expected: pod 0 of an indexed job, such as "
            f"train-node-0-0.train. Elsewhere {_HOW_TO_LIST}."
        )
    hosts = tuple(f"{name}-{index}{dot}{domain}" for index in range(number))
    return Place(hosts, rank, "Kubeflow Trainer")


def _index(
    environ: Mapping[str, str], hosts: Sequence[str], hostname: str, is_alone_on_host: bool
) -> int:
    """Find this process in the list by its host's name, or else by its rank."""
    places = list(range(len(hosts)))
    if is_alone_on_host:
        places = [hosts.index(host) for host in dict.fromkeys(hosts)]
    found = (names for names in _RANKS if names[0] in environ)
    rank_name, size_name, local_name = next(found, ("", "", ""))
    if size_name in environ and _number(environ, size_name) != len(places):
        raise ValueError(
            f"--hosts must list one worker for each process. Received: {len(places)} from --hosts "
            f"({', '.join(hosts[place] for place in places)}), and {size_name}="
            f"{environ[size_name]}. Correct one of them."
        )
    own = _label(hostname)
    here = [place for place in places if own and _label(hosts[place]) == own]
    local = _number(environ, local_name) if local_name in environ else None
    if local is None and len(here) == 1:
        local = 0
    if here and local is not None:
        chosen = here[local : local + 1]
    else:
        chosen = places[_number(environ, rank_name) :][:1] if rank_name else []
    if chosen and (not here or chosen[0] in here):
        return chosen[0]
    raise ValueError(
        "--hosts does not say which of its workers this process is. Received: "
        f"{', '.join(hosts)}, and this host's name {hostname!r}"
        + (f", {rank_name}={environ[rank_name]}" if rank_name else "")
        + ". Name hosts as `hostname` prints them there, or set RANK to this worker's place in the "
        "list, from 0 on."
    )


def _label(host: str) -> str:
    """The first part of a name; an IP address stays whole."""
    return host if re.fullmatch(r"[\d.:]+", host) else host.partition(".")[0]


def _text(environ: Mapping[str, str], name: str) -> str:
    if not environ.get(name):
        raise _broken(environ, name, "as the scheduler sets it beside the others")
    return environ[name]


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    is_number = text.isdecimal() and len(text) <= len(str(_MOST_HOSTS))
    if not is_number or int(text) > _MOST_HOSTS:
        raise _broken(environ, name, f"a whole number up to {_MOST_HOSTS:,}")
    return int(text)


def _broken(environ: Mapping[str, str], name: str, expected: str) -> ValueError:
    return ValueError(
        f"{name} is not valid. Received: {environ.get(name)!r}; expected: {expected}. Unset "
        f"what was set by hand, or {_HOW_TO_LIST}."
    )


def _unknown(environ: Mapping[str, str]) -> str:
    if "SLURM_JOB_ID" in environ:
        received = "a Slurm job, but no step of it"
        fix = "start one task for each worker: srun keras-het worker train.py"
    else:
        names = (*(names[0] for names in _RANKS), "JOB_COMPLETION_INDEX")
        found = next((name for name in names if name in environ), "")
        fix = f"{_HOW_TO_LIST}, or set TF_CONFIG"
        received = f"{found}, which does not say where the others are" if found else "none of them"
    return (
        "Variables must say where all workers are: TF_CONFIG, those of a step of Slurm, or those "
        f"of Kubeflow Trainer. Received: {received}. To fix it, {fix}."
    )


_TYPES = ("worker", "async")


@dataclass(frozen=True)
class OwnWorkers:
    """This machine's workers, the first of them with its number among all machines' workers."""

    first_index: int
    tf_configs: tuple[str, ...]
    is_async: bool


def own_workers(
    environ: Mapping[str, str], num_gpus: int, num_async_workers: int = 0
) -> OwnWorkers | None:
    """Return the workers that begin with the task of TF_CONFIG; None if it has no other machine."""
    config = read_cluster_config(environ)
    jobs = config.as_cluster_dict() if config else {}
    if config is None or len({_host(each) for job in jobs.values() for each in job}) < 2:
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
    job, first = config.task_type, config.task_index
    addresses, host = jobs[job], _host(jobs[job][first])
    here = [index for index, each in enumerate(addresses) if _host(each) == host]
    expected = list(range(first, first + num_gpus))
    if here != expected:
        left = [f"{job} {index} ({addresses[index]})" for index in here if index not in expected]
        consequence = f" {', '.join(left)} would never start." if left else ""
        raise ValueError(
            f"TF_CONFIG must list one {job} of this machine for each GPU, one after the other from "
            f"its task on.{consequence} Received: {num_gpus} GPU(s), task {job} {first} on {host}, "
            f'and in "cluster" the indices {here} on {host}; expected: {expected}. Correct the '
            "addresses on all machines, name this machine's first one as task, or choose other "
            "GPUs with --gpus."
        )
    given = json.loads(environ[TF_CONFIG])
    texts = tuple(
        json.dumps({**given, "task": {**given["task"], "index": index}}) for index in here
    )
    if job == "async":
        return OwnWorkers(len(config.sync_group_addresses) + first, texts, True)
    return OwnWorkers(config.worker_index, texts, False)


def _host(address: str) -> str:
    return address.rpartition(":")[0]
