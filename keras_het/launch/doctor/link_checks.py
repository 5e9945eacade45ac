"""Checks of the links to other nodes, and of how those nodes differ from this one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from keras_het.launch.doctor.addresses import LISTENS, UNKNOWN, UNREACHABLE
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
from keras_het.launch.doctor.gpu_checks import WITHOUT_TENSOR_FLOAT_32
from keras_het.launch.doctor.links import SYNC_JOBS, Link, Measurement, describe_node
from keras_het.strategy.cluster.cluster_config import TF_CONFIG

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
            yield _speed(link, name)
            yield from _differences(facts, link, name)
        elif link.reached != UNKNOWN:  # a check of its own has said that its name is not known
            yield _silent(link, name, measurement.waited_seconds)


def _speed(link: Link, name: str) -> Finding:
    seconds = 100e6 / max(link.bytes_per_second, 1.0)
    return expect(
        "links",
        link.bytes_per_second >= _SLOW_BYTES_PER_SECOND,
        f"{name}: {link.latency_seconds * 1e3:.2g} ms, {link.bytes_per_second / 1e6:.0f} MB/s.",
        f"The gradient of a model of 25 million weights (100 MB) takes {seconds:.1f} s.",
        "Let it exchange less often (keras_het.callbacks.LocalTraining), or train outside of the "
        'sync group (job "async"); see which network the address belongs to.',
    )


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
