"""Checks of TF_CONFIG: who this process is, and whether its addresses can be right."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

from keras_het.exchange.secret import read_secret
from keras_het.launch.doctor import addresses
from keras_het.launch.doctor.facts import Facts, Finding, fault, note, ok, warning
from keras_het.strategy.cluster.cluster_address import places_of
from keras_het.strategy.cluster.cluster_config import TF_CONFIG, ClusterConfig

_LISTENING_JOBS = ("chief", "worker", "ps", "summation")
"""Nothing listens at the addresses of the job `async`, and an evaluator is a cluster of its own."""
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
_NO_PROXY = ("no_grpc_proxy", "no_proxy")


def _tasks_of(config: ClusterConfig) -> dict[str, str]:
    return {
        f"{job} {index}": address
        for job, places in config.as_cluster_dict().items()
        for index, address in enumerate(places)
    }


def listening_tasks(config: ClusterConfig) -> dict[str, str]:
    tasks = _tasks_of(config).items()
    return {name: address for name, address in tasks if name.startswith(_LISTENING_JOBS)}


def own_task(config: ClusterConfig) -> str:
    return f"{config.task_type} {config.task_index}"


def num_tasks_here(config: ClusterConfig | None) -> int:
    if config is None:
        return 1
    hosts = {name: address.rpartition(":")[0] for name, address in _tasks_of(config).items()}
    return max(1, list(hosts.values()).count(hosts.get(own_task(config), "")))


def tf_config(facts: Facts) -> Iterator[Finding]:
    if facts.cluster_problem:
        yield fault(
            facts.cluster_problem,
            f"Correct {TF_CONFIG} on this machine, and compare it with that of the others: all "
            "list the same addresses in the same order, and each has its own task.",
        )
    elif facts.cluster is None:
        yield note(f"{TF_CONFIG} is not set: this process trains by itself.")
    else:
        config = facts.cluster
        jobs = {job: len(places) for job, places in config.as_cluster_dict().items()}
        counts = ", ".join(f"{count} of the job {job}" for job, count in jobs.items())
        yield ok(f"{TF_CONFIG}: this process is {own_task(config)}; tasks: {counts}.")


def own_address(facts: Facts) -> Iterator[Finding]:
    for name, address in _own_addresses(facts).items():
        if not places_of(address):
            yield _unknown_host(f"this machine ({name})", address)
            continue
        problem = addresses.bind_problem(address)
        if problem == errno.EADDRINUSE:
            port = int(address.rpartition(":")[2])
            holder = addresses.holder_of(port)
            yield fault(
                f"The port of {name} is taken{f' by {holder}' if holder else ''}. Received: "
                f"{address}; expected: nothing listens there before training starts.",
                f"End it (often a worker that an earlier run has left: `ss -ltnp | grep {port}`), "
                f"or give {name} another port in {TF_CONFIG} on all machines.",
            )
        elif problem == errno.EACCES:
            yield fault(
                f"This user may not listen on the port of {name}. Received: {address}.",
                f"Give it a port of 1024 or above in {TF_CONFIG} on all machines.",
            )
        elif problem:
            yield _foreign(facts, name, address, problem)
        else:
            yield ok(f"{name} can listen at {address}.")


def other_names(facts: Facts) -> Iterator[Finding]:
    others = other_tasks(facts.cluster)
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(places_of, others.values()))
    for (name, address), places in zip(others.items(), found, strict=True):
        if not places:
            yield _unknown_host(name, address)


def loopback(facts: Facts) -> Iterator[Finding]:
    """Whether addresses of several machines include one that only its own machine reaches."""
    if facts.cluster is None:
        return
    tasks = listening_tasks(facts.cluster)
    known = {name: address for name, address in tasks.items() if places_of(address)}
    local = {name: address for name, address in known.items() if addresses.is_loopback(address)}
    if not local or len(local) == len(known):
        return
    own = own_task(facts.cluster)
    for name, address in local.items():
        whose = "This machine's own name" if name == own else f"The address of {name}"
        yield fault(
            f"{whose} stands for the loopback device, which other machines cannot reach. Received: "
            f"{address}; expected: an address in the network of the others.",
            f"Give the machine's IP address in {TF_CONFIG} on all machines, or correct its name in "
            "/etc/hosts (Debian's 127.0.1.1).",
        )


def secret(facts: Facts) -> Iterator[Finding]:
    config = facts.cluster
    if config is None or not (config.async_workers or config.parameter_services):
        return
    try:
        read_secret(facts.environ)
    except (ValueError, OSError) as error:
        yield fault(str(error), "Set it in the environment of all tasks, the same for all.")
    else:
        yield ok("There is a secret for the parameter service.")


def proxies(facts: Facts) -> Iterator[Finding]:
    others = other_tasks(facts.cluster)
    used = _first_set(facts.environ, _PROXIES)
    if not others or used is None:
        return
    excepted = _first_set(facts.environ, _NO_PROXY)
    endings = [part.strip() for part in (facts.environ[excepted] if excepted else "").split(",")]
    hosts = [address.rpartition(":")[0].strip("[]") for address in others.values()]
    caught = [host for host in hosts if not any(end and host.endswith(end) for end in endings)]
    if caught:
        yield warning(
            f"{used}={facts.environ[used]}: TensorFlow's gRPC connects to {', '.join(caught)} "
            "through this web proxy, which often refuses, and workers then wait for each other.",
            f"Unset {used} for training, or set no_proxy={','.join(dict.fromkeys(hosts))}",
        )


def _own_addresses(facts: Facts) -> dict[str, str]:
    config = facts.cluster
    if config is None or config.task_type not in _LISTENING_JOBS:
        return {}
    own = own_task(config)
    found = {own: listening_tasks(config)[own]}
    if config.async_workers and not config.parameter_services and config.is_chief:
        found["the parameter service"] = config.service_address(facts.environ)
    return found


def other_tasks(config: ClusterConfig | None) -> dict[str, str]:
    if config is None:
        return {}
    tasks = listening_tasks(config)
    tasks.pop(own_task(config), None)
    return tasks


def _unknown_host(name: str, address: str) -> Finding:
    host = address.rpartition(":")[0]
    return fault(
        f"The host of {name} is not known here. Received: {address}; expected: a name that "
        f"`getent hosts {host}` finds, or an IP address.",
        f"Correct it in {TF_CONFIG} on all machines, or add it to /etc/hosts or the name server.",
    )


def _foreign(facts: Facts, name: str, address: str, problem: int) -> Finding:
    text = (
        f"The address of {name} is not one of this machine. Received: {address} "
        f"({os.strerror(problem)}); expected: an address of {facts.host or 'this machine'}."
    )
    fix = (
        f'Give this machine its own "index" in {TF_CONFIG}: each task runs on the machine that its '
        "address names (`ip -brief address` lists them)."
    )
    if facts.environ.get("KUBERNETES_SERVICE_HOST"):
        # a service forwards its port to the pod
        return warning(text, f"{fix} A service with a virtual address should be headless.")
    return fault(text, fix)


def _first_set(environ: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if environ.get(name)), None)
