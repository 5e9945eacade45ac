"""Checks of TF_CONFIG: who this process is, and whether its addresses can be right."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil

from keras_het.exchange.secret import read_secret
from keras_het.launch.doctor.facts import (
    Facts,
    Finding,
    fault,
    note,
    ok,
    unless,
    warning,
)
from keras_het.strategy.cluster.arrival import places_of
from keras_het.strategy.cluster.cluster_config import TF_CONFIG, ClusterConfig

_LISTENING_JOBS = ("chief", "worker", "ps", "summation")
"""Nothing listens at the addresses of the job `async`, and an evaluator is its own cluster."""


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


def other_tasks(config: ClusterConfig | None) -> dict[str, str]:
    tasks = listening_tasks(config).items() if config else ()
    return {name: address for name, address in tasks if config and name != own_task(config)}


def num_tasks_here(config: ClusterConfig | None) -> int:
    if config is None:
        return 1
    hosts = {name: _host(address) for name, address in _tasks_of(config).items()}
    return max(1, list(hosts.values()).count(hosts.get(own_task(config), "")))


def _host(address: str) -> str:
    return address.rpartition(":")[0]


def cluster(facts: Facts) -> Iterator[Finding]:
    config = facts.cluster
    if facts.cluster_problem:
        yield fault(
            "tf_config",
            facts.cluster_problem,
            f"Correct {TF_CONFIG} on this machine, and compare it with the others': all list the "
            "same addresses in the same order, and each has its own task.",
        )
    if config is None:
        if not facts.cluster_problem:
            yield note("tf_config", f"{TF_CONFIG} is not set: this process trains by itself.")
        return
    jobs = {job: len(places) for job, places in config.as_cluster_dict().items()}
    counts = ", ".join(f"{count} of the job {job}" for job, count in jobs.items())
    own, listening = own_task(config), listening_tasks(config)
    yield ok("tf_config", f"{TF_CONFIG}: this process is {own}; tasks: {counts}.")
    addresses = {own: listening[own]} if own in listening else {}
    if addresses and config.is_chief and config.async_workers and not config.parameter_services:
        addresses["the parameter service"] = config.service_address(facts.environ)
    for name, address in addresses.items():
        yield _own_address(facts, name, address)
    with ThreadPoolExecutor(16) as pool:
        found = pool.map(places_of, listening.values())
    places = dict(zip(listening, found, strict=True))
    for name, address in listening.items():
        if name != own and not places[name]:
            yield _unknown_host("other_names", name, address)
    known = [name for name in listening if places[name]]
    local = [name for name in known if all(map(_is_loopback, places[name]))]
    # only their own machine reaches them, and there are several machines
    for name in local if len(local) < len(known) else ():
        whose = "This machine's own name" if name == own else f"The address of {name}"
        yield fault(
            "loopback",
            f"{whose} stands for the loopback device, which other machines cannot reach. Received: "
            f"{listening[name]}; expected: an address in the network of the others.",
            f"Give the machine's IP address in {TF_CONFIG} on all machines, or correct its name in "
            "/etc/hosts (Debian's 127.0.1.1).",
        )
    if config.async_workers or config.parameter_services:
        try:
            read_secret(facts.environ)
        except (ValueError, OSError) as error:
            fix = "Set it in the environment of all tasks, the same for all."
            yield fault("secret", str(error), fix)
        else:
            yield ok("secret", "There is a secret for the parameter service.")
    others = [_host(address).strip("[]") for address in other_tasks(config).values()]
    yield _proxy(facts, others)


def _own_address(facts: Facts, name: str, address: str) -> Finding:
    if not places_of(address):
        return _unknown_host("own_address", f"this machine ({name})", address)
    problem, port = _bind_problem(address), address.rpartition(":")[2]
    if problem == 0:
        return ok("own_address", f"{name} can listen at {address}.")
    if problem == errno.EADDRINUSE:
        holder = _holder_of(int(port))
        return fault(
            "own_address",
            f"The port of {name} is taken{f' by {holder}' if holder else ''}. Received: "
            f"{address}; expected: nothing listens there before training starts.",
            f"End it (often a worker that an earlier run has left: `ss -ltnp | grep {port}`), "
            f"or give {name} another port in {TF_CONFIG} on all machines.",
        )
    if problem == errno.EACCES:
        return fault(
            "own_address",
            f"This user may not listen on the port of {name}. Received: {address}.",
            f"Give it a port of 1024 or above in {TF_CONFIG} on all machines.",
        )
    # a service of Kubernetes forwards its port to the pod
    is_in_kubernetes = bool(facts.environ.get("KUBERNETES_SERVICE_HOST"))
    virtual = " A service with a virtual address should be headless." if is_in_kubernetes else ""
    return (warning if is_in_kubernetes else fault)(
        "own_address",
        f"The address of {name} is not one of this machine. Received: {address} "
        f"({os.strerror(problem)}); expected: an address of {facts.host or 'this machine'}.",
        f'Give this machine its own "index" in {TF_CONFIG}: each task runs on the machine that its '
        f"address names (`ip -brief address` lists them).{virtual}",
    )


def _bind_problem(address: str) -> int:
    """Try to listen on an address for a moment; return the number of the error, 0 if it can be."""
    last = errno.EADDRNOTAVAIL
    for family, place in places_of(address):
        try:
            socket.create_server(place, family=family).close()
        except OSError as error:
            last = error.errno or errno.EADDRNOTAVAIL
            if last == errno.EADDRINUSE:
                return last
        else:
            return 0
    return last


def _holder_of(port: int) -> str:
    """Return the program that listens on a port of this machine, empty if it is hidden."""
    with contextlib.suppress(psutil.Error, OSError, RuntimeError):
        for each in psutil.net_connections("tcp"):
            is_it = each.laddr and each.laddr.port == port and each.status == psutil.CONN_LISTEN
            if is_it and each.pid:
                return f"{psutil.Process(each.pid).name()} (process {each.pid})"
    return ""


def _is_loopback(place: tuple[socket.AddressFamily, tuple[str, int]]) -> bool:
    return ipaddress.ip_address(place[1][0].partition("%")[0]).is_loopback


def _unknown_host(check: str, name: str, address: str) -> Finding:
    return fault(
        check,
        f"The host of {name} is not known here. Received: {address}; expected: a name that "
        f"`getent hosts {_host(address)}` finds, or an IP address.",
        f"Correct it in {TF_CONFIG} on all machines, or add it to /etc/hosts or the name server.",
    )


def _proxy(facts: Facts, hosts: list[str]) -> Finding:
    used, excepted = (
        next((name for name in names if facts.environ.get(name)), "")
        for names in (("grpc_proxy", "https_proxy", "http_proxy"), ("no_grpc_proxy", "no_proxy"))
    )
    endings = [each.strip() for each in facts.environ.get(excepted, "").split(",") if each.strip()]
    caught = [host for host in hosts if not host.endswith(tuple(endings))]
    return unless(
        "proxies",
        not (used and caught),
        f"{used}={facts.environ.get(used)}: TensorFlow's gRPC connects to {', '.join(caught)} "
        "through this web proxy, which often refuses, and workers then wait for each other.",
        f"Unset {used} for training, or set no_proxy={','.join(dict.fromkeys(hosts))}",
    )
