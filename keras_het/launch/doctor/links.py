"""Links between this node and the others, measured by the doctors on all of them, and checked.

Each serves the others at its own address while it times messages to theirs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hmac
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from keras_het import __version__
from keras_het.exchange.client import Client
from keras_het.exchange.links import measure_link, send_probe, take_probe
from keras_het.exchange.message import Kind, Message
from keras_het.exchange.secret import SECRET_FILE_VARIABLE, SECRET_VARIABLE, read_secret
from keras_het.exchange.server import Server
from keras_het.launch.doctor.cluster_checks import listening_tasks, other_tasks, own_task
from keras_het.launch.doctor.facts import (
    FAULT,
    Facts,
    Finding,
    expect,
    fault,
    note,
    unless,
    warning,
)
from keras_het.launch.doctor.machine_checks import WITHOUT_TENSOR_FLOAT_32, have_tensor_float_32
from keras_het.launch.doctor.tensorflow_facts import last_line, run_program
from keras_het.strategy.cluster.cluster_config import TF_CONFIG, ClusterConfig

SYNC_JOBS = ("chief", "worker")
_THIS_PROGRAM = "keras_het.launch.doctor.links"
_CONNECT_SECONDS = 60.0
_LONGEST_START_SECONDS = 120.0
_SERVICE = "doctor"
_CALL_SECONDS = 10.0
_DESCRIPTION_SECONDS = 2.0
_POLL_SECONDS = 0.1
_NO_ANSWER = (ConnectionError, TimeoutError, NotImplementedError)


LISTENS, REFUSED, UNREACHABLE, UNKNOWN = "listens", "refused", "unreachable", "unknown"


@dataclasses.dataclass(frozen=True)
class Link:
    """What was measured from this node to another."""

    task: str
    address: str
    reached: str
    answers: bool = False
    refused: bool = False
    latency_seconds: float = 0.0
    bytes_per_second: float = 0.0
    clock_ahead_seconds: float = 0.0
    node: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What was measured from this node."""

    links: tuple[Link, ...] = ()
    waited_seconds: float = 0.0
    nccl: str | None = None
    """What prevents sums by NCCL, empty if nothing does; None where it was not tried."""


def describe_node(facts: Facts) -> dict[str, Any]:
    """Return what other nodes compare with themselves."""
    found = facts.tensorflow
    return {
        "host": facts.host,
        "keras_het": __version__,
        "tensorflow": found.tensorflow,
        "keras": found.keras,
        "device": "GPU" if found.replicas else "CPU",
        "replicas": max(1, found.replicas),
        "tensor_float_32": have_tensor_float_32(facts),
    }


def measure_links(facts: Facts, wait_seconds: float) -> Measurement:
    """Measure the links to the other tasks while they measure theirs."""
    config = facts.cluster
    if config is None or not other_tasks(config):
        return Measurement()
    if wait_seconds <= 0:
        others = other_tasks(config)
        with ThreadPoolExecutor(16) as pool:  # each that is silent takes two seconds
            reached = list(pool.map(reach, others.values()))
        return Measurement(tuple(map(Link, others.keys(), others.values(), reached)))
    deadline = time.monotonic() + wait_seconds
    key = _credential(config, facts.environ)
    tasks, own = listening_tasks(config), own_task(config)
    names = list(tasks)
    place = names.index(own) if own in tasks else -1
    desk = None
    if own in tasks:
        with contextlib.suppress(OSError):  # a separate check says why
            desk = _Desk(tasks[own], key, describe_node(facts))
    # as in a ring: where all begin at once, each node then sends to one and hears from one
    ring = [*names[place + 1 :], *names[: max(place, 0)]]
    found = _measure_all({name: tasks[name] for name in ring}, key, place, deadline)
    if desk is not None:
        answered = {names.index(name) for name in ring if found[name].answers}
        # one that refuses this node is refused by it, too, and cannot tell when it has seen that
        is_refused = any(link.refused for link in found.values())
        desk.serve_until(answered, deadline, is_refused)
    links = tuple(found[name] for name in names if name != own)
    return Measurement(links, wait_seconds, nccl=_try_nccl(facts, links))


def _credential(config: ClusterConfig, environ: Mapping[str, str]) -> bytes:
    """Return what doctors of one cluster share: its TF_CONFIG, and the secret if there is one."""
    text = json.dumps(config.as_cluster_dict(), sort_keys=True)
    try:
        secret = read_secret(environ)
    except (ValueError, OSError):  # the check of secrets says so
        secret = f"{SECRET_VARIABLE} or {SECRET_FILE_VARIABLE}".encode()
    return hmac.digest(secret, f"keras-het doctor {text}".encode(), "sha256")


def reach(address: str, timeout_seconds: float = 2.0) -> str:
    """Connect to an address; return what happened."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout_seconds).close()
    except socket.gaierror:
        return UNKNOWN
    except ConnectionRefusedError:
        return REFUSED
    except OSError:
        return UNREACHABLE
    return LISTENS


class _Desk:
    """This node's server: describes the node, takes messages, and knows who has finished."""

    def __init__(self, address: str, key: bytes, node: Mapping[str, Any]) -> None:
        self._node = np.frombuffer(json.dumps(dict(node)).encode(), np.uint8)
        self._finished: set[int] = set()
        self._changed = threading.Condition()
        self._server = Server(address)
        self._server.serve(_SERVICE, key, self._answer)
        self._server.start()

    def _answer(self, sender: int, request: Message) -> Message:
        if request.kind is Kind.DESCRIBE:
            return Message(Kind.DESCRIPTION, (int(1e6 * time.time()),), (self._node,))
        if request.kind is Kind.FINISH:
            with self._changed:
                self._finished.add(sender)
                self._changed.notify_all()
            return Message(Kind.DONE)
        return take_probe(sender, request)

    def serve_until(self, answered: Set[int], deadline: float, to_the_end: bool) -> None:
        """Serve those that still measure, then end."""
        # one that began late has at least the time of a call
        end = max(deadline, time.monotonic() + _CALL_SECONDS)
        with self._changed:
            self._changed.wait_for(
                lambda: answered <= self._finished and not to_the_end, end - time.monotonic()
            )
        self._server.close()


def _measure_all(
    others: Mapping[str, str], key: bytes, own_index: int, deadline: float
) -> dict[str, Link]:
    found: dict[str, Link] = {}
    waiting = list(others)
    while waiting:
        for name in waiting:
            found[name] = _measure(name, others[name], key, own_index)
        waiting = [name for name in waiting if not (found[name].answers or found[name].refused)]
        if time.monotonic() > deadline:
            break
        time.sleep(_POLL_SECONDS)
    return found


def _measure(task: str, address: str, key: bytes, own_index: int) -> Link:
    connected = Link(task, address, reach(address, 1.0))
    if connected.reached != LISTENS:
        return connected
    client = Client(address, _SERVICE, key, own_index)
    try:
        said = client.ask(Message(Kind.DESCRIBE), _DESCRIPTION_SECONDS)
        ahead = said.numbers[0] / 1e6 - time.time()
        speed = measure_link(functools.partial(send_probe, client))
        client.ask(Message(Kind.FINISH), _CALL_SECONDS)
    except PermissionError:
        return dataclasses.replace(connected, refused=True)
    except _NO_ANSWER:
        return connected
    finally:
        client.close()
    node = json.loads(said.vectors[0].tobytes())
    return Link(task, address, LISTENS, True, False, *speed, ahead, node)


def _try_nccl(facts: Facts, links: Sequence[Link]) -> str | None:
    """Let workers that all have GPUs sum by NCCL; the others' doctors do the same meanwhile."""
    nodes = [describe_node(facts), *(link.node for link in links)]
    jobs = facts.cluster.as_cluster_dict().keys() if facts.cluster else {"none"}
    is_group = jobs <= set(SYNC_JOBS) and all(link.answers for link in links)
    have_gpus = facts.tensorflow.cuda and all(node.get("device") == "GPU" for node in nodes)
    if not (is_group and have_gpus):
        return None
    environ = {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_FORCE_GPU_ALLOW_GROWTH": "true", **facts.environ}
    try:
        given = facts.environ[TF_CONFIG]
        ended = run_program(_THIS_PROGRAM, environ, _LONGEST_START_SECONDS, given)
    except subprocess.TimeoutExpired as error:
        return f"no answer within {error.timeout:g} s"
    return last_line(ended) if ended.returncode else ""


def _sum_by_nccl() -> None:
    """Make the strategy of the TF_CONFIG in standard input, whose first sum by NCCL may fail."""
    os.environ[TF_CONFIG] = sys.stdin.read()
    from keras_het.strategy.heterogeneous_strategy import HeterogeneousStrategy

    HeterogeneousStrategy(startup_timeout_seconds=_CONNECT_SECONDS).barrier()


_SLOW_BYTES_PER_SECOND = 100e6
_MOST_SECONDS_AHEAD = 5.0


def links(facts: Facts, measurement: Measurement) -> Iterator[Finding]:
    if measurement.nccl is not None:
        yield expect(
            "nccl",
            not measurement.nccl,
            "Sum by NCCL between the GPUs of all workers.",
            f"It failed. Received: {measurement.nccl}",
            "Set NCCL_SOCKET_IFNAME to the interface that reaches the other machines; "
            "NCCL_DEBUG=INFO says more.",
        )
    for link in measurement.links:
        name = f"{link.task} ({link.address})"
        if link.answers:
            seconds = 100e6 / max(link.bytes_per_second, 1.0)
            yield expect(
                "links",
                link.bytes_per_second >= _SLOW_BYTES_PER_SECOND,
                f"{name}: {link.latency_seconds * 1e3:.2g} ms, {link.bytes_per_second / 1e6:.0f} "
                "MB/s.",
                f"The gradient of a model of 25 million weights (100 MB) takes {seconds:.1f} s.",
                "Let it exchange less often (keras_het.callbacks.LocalTraining), or train outside "
                'of the sync group (job "async"); see which network the address belongs to.',
            )
            yield from _differences(facts, link, name)
        elif link.reached != UNKNOWN:  # a separate check has said that its name is not known
            yield _silent(link, name, measurement.waited_seconds)


def _silent(link: Link, name: str, waited_seconds: float) -> Finding:
    if link.refused:
        return fault(
            "links",
            f"The doctor of {name} refuses this one: its {TF_CONFIG} lists other addresses, or "
            "its secret differs.",
            f'Give all machines the same "cluster" in {TF_CONFIG}, in the same order, and the '
            "same KERAS_HET_SECRET.",
        )
    if link.reached == UNREACHABLE:
        return fault(
            "links",
            f"{name} cannot be reached: its host does not answer.",
            "See whether it runs, whether the address is right, and whether a firewall lets "
            f"the port {link.address.rpartition(':')[2]} through, in both directions.",
        )
    if link.reached == LISTENS:
        return expect(
            "links",
            not waited_seconds,
            f"{name} takes connections.",
            "Whatever listens there is not a doctor of this version.",
            "Find out what it is (on that machine: `ss -ltnp`), perhaps a training under way.",
        )
    when = f"within {waited_seconds:g} s" if waited_seconds else "yet"
    return (warning if waited_seconds else note)(
        "links",
        f"The host of {name} answers, and nothing listens there {when}: its link is not measured.",
        "Run keras-het doctor on all machines at the same time, each with its own "
        f"{TF_CONFIG}; --wait-seconds gives them longer. If it runs there, a firewall refuses the "
        "port.",
    )


def _differences(facts: Facts, link: Link, name: str) -> Iterator[Finding]:
    own, other = describe_node(facts), link.node
    for key, product in (("tensorflow", "TensorFlow"), ("keras", "Keras"), ("keras_het",) * 2):
        yield unless(
            "links",
            other.get(key) == own[key],
            f"{name} has another version of {product}. Received: {other.get(key)} there, "
            f"{own[key]} here; expected: the same on all machines.",
            "Install the same versions everywhere, for example from one lock file.",
            FAULT,
        )
    is_in_group = facts.cluster is not None and facts.cluster.task_type in SYNC_JOBS
    both = is_in_group and link.task.startswith(SYNC_JOBS)
    yield unless(
        "links",
        not both or other.get("device") == own["device"],
        f"{name} would train on {other.get('device')}s and this process on {own['device']}s: a "
        "collective group has one type of device.",
        "Make the GPUs usable on both, or hide them on both (CUDA_VISIBLE_DEVICES=-1), or give "
        'the machine without GPU the job "async" or "summation".',
        FAULT,
    )
    here, there = own["tensor_float_32"], other.get("tensor_float_32")
    if both and here and there and here != there:
        yield note(
            "links",
            f"TensorFlow multiplies float32 in TensorFloat-32 by default on {_which(there)} of the "
            f"GPUs of {name} and on {_which(here)} of those here: products differ by about 1e-3.",
            WITHOUT_TENSOR_FLOAT_32,
        )
    ahead = link.clock_ahead_seconds
    yield unless(
        "links",
        abs(ahead) <= _MOST_SECONDS_AHEAD,
        f"The clock of {name} is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} this "
        "one: their logs cannot be compared.",
        "Synchronize the clocks (NTP: `timedatectl set-ntp true`).",
    )


def _which(have_it: Sequence[bool]) -> str:
    return "some" if len(have_it) > 1 else "all" if have_it[0] else "none"


if __name__ == "__main__":
    _sum_by_nccl()
