"""Links between this node and the others, measured by the doctors that run on all of them."""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from keras_het import __version__
from keras_het.launch.doctor.addresses import LISTENS, UNKNOWN, UNREACHABLE, reach
from keras_het.launch.doctor.cluster_checks import listening_tasks, other_tasks, own_task
from keras_het.launch.doctor.facts import Facts, Finding, fault, note, ok, warning
from keras_het.launch.doctor.gpu_checks import WITHOUT_TENSOR_FLOAT_32, have_tensor_float_32
from keras_het.launch.doctor.link_measurement import credential_of, measure_together
from keras_het.launch.doctor.tensorflow_facts import run_program
from keras_het.strategy.cluster.cluster_config import TF_CONFIG

_NCCL_TRIAL = "keras_het.launch.doctor.nccl_trial"
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
    nccl: str | None = None
    """What prevents sums by NCCL, empty if nothing does; None where it was not tried."""


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
        "tensor_float_32": have_tensor_float_32(facts),
    }


def measure_links(facts: Facts, wait_seconds: float) -> Measurement:
    config = facts.cluster
    others = other_tasks(config)
    if config is None or not others:
        return Measurement()
    if wait_seconds <= 0:
        return Measurement(_plain(others))
    key = credential_of(config.as_cluster_dict(), facts.environ)
    about = listening_tasks(config), own_task(config), describe_node(facts), key
    measured = measure_together(*about, wait_seconds)
    links = tuple(Link(task, address, **measured[task]) for task, address in others.items())
    return Measurement(links, wait_seconds, nccl=_try_nccl(facts, links))


def _try_nccl(facts: Facts, links: Sequence[Link]) -> str | None:
    """Let workers that all have GPUs sum by NCCL; the others' doctors do the same meanwhile."""
    nodes = [describe_node(facts), *(link.node for link in links)]
    jobs = facts.cluster.as_cluster_dict().keys() if facts.cluster else {"none"}
    is_group = jobs <= set(_SYNC_JOBS) and all(link.answers for link in links)
    is_cuda_build = facts.tensorflow is not None and facts.tensorflow.cuda
    if not (is_group and is_cuda_build and all(node.get("device") == "GPU" for node in nodes)):
        return None
    environ = {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_FORCE_GPU_ALLOW_GROWTH": "true", **facts.environ}
    try:
        given = facts.environ[TF_CONFIG]
        ended = run_program(_NCCL_TRIAL, environ, _LONGEST_START_SECONDS, given)
    except subprocess.TimeoutExpired as error:
        return f"no answer within {error.timeout:g} s"
    lines = [line for line in ended.stderr.splitlines() if line.strip()]
    return "" if ended.returncode == 0 else (lines or [f"exit code {ended.returncode}"])[-1]


def _plain(others: Mapping[str, str]) -> tuple[Link, ...]:
    with ThreadPoolExecutor(16) as pool:  # each that is silent takes two seconds
        found = list(pool.map(reach, others.values()))
    return tuple(
        Link(task, address, reached, latency_seconds=seconds)
        for (task, address), (reached, seconds) in zip(others.items(), found, strict=True)
    )


_SLOW_BYTES_PER_SECOND = 100e6
_MOST_SECONDS_AHEAD = 5.0
_SYNC_JOBS = ("chief", "worker")


def links(facts: Facts, measurement: Measurement) -> Iterator[Finding]:
    if measurement.nccl is not None:
        yield (
            warning(
                f"NCCL does not sum between the GPUs of the workers. Received: {measurement.nccl}",
                "Set NCCL_SOCKET_IFNAME to the interface that reaches the other machines; "
                "NCCL_DEBUG=INFO says more.",
            )
            if measurement.nccl
            else ok("NCCL sums between the GPUs of all workers.")
        )
    for link in measurement.links:
        name = f"{link.task} ({link.address})"
        if link.answers:
            yield from _speed(link, name)
            yield from _differences(facts, link, name)
        elif link.refused:
            yield fault(
                f"The doctor of {name} refuses this one: its {TF_CONFIG} lists other addresses, or "
                "its secret is another.",
                f'Give all machines the same "cluster" in {TF_CONFIG}, in the same order, and the '
                "same KERAS_HET_SERVICE_SECRET.",
            )
        elif link.reached == UNREACHABLE:
            yield fault(
                f"{name} cannot be reached: its host does not answer.",
                "See whether it runs, whether the address is right, and whether a firewall lets "
                f"the port {link.address.rpartition(':')[2]} through, in both directions.",
            )
        elif link.reached != UNKNOWN:  # a check of its own has said that its name is not known
            yield _silent(link, name, measurement.waited_seconds)


def _silent(link: Link, name: str, waited_seconds: float) -> Finding:
    if link.reached == LISTENS:
        milliseconds = f" {link.latency_seconds * 1e3:.2g} ms away"
        if not waited_seconds:
            return ok(f"{name} takes connections,{milliseconds}.")
        return warning(
            f"Something that is no doctor of this version listens at {name},{milliseconds}.",
            "See what it is (on that machine: `ss -ltnp`), perhaps a training under way.",
        )
    if not waited_seconds:
        return note(f"The host of {name} answers; nothing listens there yet.")
    return warning(
        f"The host of {name} answers, and nothing listens there within {waited_seconds:g} s: its "
        "link is not measured.",
        "Run keras-het doctor on all machines at the same time, each with its own "
        f"{TF_CONFIG}; --wait gives them longer. If it runs there, a firewall refuses the port.",
    )


def _speed(link: Link, name: str) -> Iterator[Finding]:
    text = (
        f"{name}: {link.latency_seconds * 1e3:.2g} ms, a call {link.call_seconds * 1e3:.2g} ms, "
        f"{link.bytes_per_second / 1e6:.0f} MB/s."
    )
    if link.bytes_per_second >= _SLOW_BYTES_PER_SECOND:
        yield ok(text)
        return
    seconds = 100e6 / max(link.bytes_per_second, 1.0)
    yield warning(
        f"{text} The gradient of a model of 25 million weights (100 MB) takes {seconds:.1f} s.",
        "Let it exchange less often (keras_het.callbacks.LocalTraining), or train outside of the "
        'sync group (job "async"); see which network the address belongs to.',
    )


def _differences(facts: Facts, link: Link, name: str) -> Iterator[Finding]:
    own = describe_node(facts)
    for key, product in (("tensorflow", "TensorFlow"), ("keras", "Keras"), ("keras_het",) * 2):
        if link.node.get(key) != own[key]:
            yield fault(
                f"{name} has another version of {product}. Received: {link.node.get(key)} there, "
                f"{own[key]} here; expected: the same on all machines.",
                "Install the same versions everywhere, for example from one lock file.",
            )
    is_in_group = facts.cluster is not None and facts.cluster.task_type in _SYNC_JOBS
    both = is_in_group and link.task.startswith(_SYNC_JOBS)
    if both and link.node.get("device") != own["device"]:
        yield fault(
            f"{name} would train on {link.node.get('device')}s and this process on "
            f"{own['device']}s: a collective group has one type of device.",
            "Make the GPUs usable on both, or hide them on both (CUDA_VISIBLE_DEVICES=-1), or give "
            'the machine without GPU the job "async" or "summation".',
        )
    here, there = own["tensor_float_32"], link.node.get("tensor_float_32")
    if both and here and there and here != there:
        yield note(
            f"TensorFlow multiplies float32 in TensorFloat-32 by default on {_which(there)} of the "
            f"GPUs of {name} and on {_which(here)} of those here: products differ by about 1e-3.",
            WITHOUT_TENSOR_FLOAT_32,
        )
    if abs(link.clock_ahead_seconds) > _MOST_SECONDS_AHEAD:
        yield warning(
            f"The clock of {name} is {abs(link.clock_ahead_seconds):.0f} s "
            f"{'ahead of' if link.clock_ahead_seconds > 0 else 'behind'} this one: logs of both "
            "do not fit together.",
            "Synchronize the clocks (NTP: `timedatectl set-ntp true`).",
        )


def _which(have_it: Sequence[bool]) -> str:
    return "some" if len(have_it) > 1 else "all" if have_it[0] else "none"
