"""Checks of the links to the other nodes, and of what these say of themselves."""

from __future__ import annotations

from collections.abc import Iterator

from keras_het.launch.doctor.addresses import LISTENS, UNKNOWN, UNREACHABLE
from keras_het.launch.doctor.facts import Facts
from keras_het.launch.doctor.findings import Finding, fault, note, ok, warning
from keras_het.launch.doctor.links import Link, Measurement, describe_node
from keras_het.strategy.cluster.cluster_config import TF_CONFIG

_SLOW_BYTES_PER_SECOND = 100e6
_MOST_SECONDS_AHEAD = 5.0
_SYNC_JOBS = ("chief", "worker")


def links(facts: Facts, measurement: Measurement) -> Iterator[Finding]:
    """Whether the other nodes answer, and how fast."""
    if measurement.problem:
        yield warning(
            f"The links are not measured. Received: {measurement.problem}.",
            "Run it again; with --wait 0 it only sees whether the addresses can be reached.",
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
    if (
        is_in_group
        and link.task.startswith(_SYNC_JOBS)
        and link.node.get("device") != own["device"]
    ):
        yield fault(
            f"{name} would train on {link.node.get('device')}s and this process on "
            f"{own['device']}s: a collective group has one type of device.",
            "Make the GPUs usable on both, or hide them on both (CUDA_VISIBLE_DEVICES=-1), or give "
            'the machine without GPU the job "async" or "summation".',
        )
    if abs(link.clock_ahead_seconds) > _MOST_SECONDS_AHEAD:
        yield warning(
            f"The clock of {name} is {abs(link.clock_ahead_seconds):.0f} s "
            f"{'ahead of' if link.clock_ahead_seconds > 0 else 'behind'} this one: logs of both "
            "do not fit together.",
            "Synchronize the clocks (NTP: `timedatectl set-ntp true`).",
        )
