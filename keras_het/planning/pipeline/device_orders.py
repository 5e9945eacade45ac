"""Orders of devices that a pipeline may follow: hosts in any order, the devices of one together."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from keras_het.planning.pipeline.problem import Devices, ModelProfile

_MOST_HOSTS = 6


def device_orders(
    profile: ModelProfile, devices: Devices, most: int | None = None
) -> list[tuple[int, ...]]:
    """Return orders of all devices, those with the fastest links between neighbours first.

    The devices of a host are neighbours, the fastest first. Up to 6 hosts come in every order, more
    hosts each by the nearest neighbour from every start. Orders that differ only in the names of
    devices are given once.
    """
    seconds = (profile.forward_seconds + profile.backward_seconds).sum(axis=0)
    hosts = sorted(set(devices.hosts))
    inside = {
        host: sorted(
            (d for d in range(devices.num_devices) if devices.hosts[d] == host),
            key=lambda d: (seconds[d], -devices.memory_bytes[d], d),
        )
        for host in hosts
    }
    size = float(profile.cut_bytes[1:-1].mean()) if profile.num_units > 1 else 0.0

    def link(before: int, after: int) -> float:
        sender, receiver = inside[before][-1], inside[after][0]
        there = devices.transfer_seconds(sender, receiver, size)
        return max(there, devices.transfer_seconds(receiver, sender, size))

    def length(order: Sequence[int]) -> float:
        return sum(itertools.starmap(link, itertools.pairwise(order)))

    candidates: Iterable[tuple[int, ...]]
    if len(hosts) <= _MOST_HOSTS:
        candidates = itertools.permutations(hosts)
    else:
        chains = [_nearest(start, hosts, link) for start in hosts]
        candidates = [*chains, *(chain[::-1] for chain in chains)]
    found: dict[bytes, tuple[int, ...]] = {}
    for order in sorted(candidates, key=lambda order: (length(order), order)):
        chosen = tuple(device for host in order for device in inside[host])
        found.setdefault(_looks(profile, devices, chosen), chosen)
        if len(found) == most:
            break
    return list(found.values())


def _nearest(
    start: int, hosts: Sequence[int], link: Callable[[int, int], float]
) -> tuple[int, ...]:
    chain, left = [start], set(hosts) - {start}
    while left:
        chain.append(min(left, key=lambda host: (link(chain[-1], host), host)))
        left.remove(chain[-1])
    return tuple(chain)


def _looks(profile: ModelProfile, devices: Devices, order: tuple[int, ...]) -> bytes:
    """Return all that a plan can see of an order."""
    chosen = list(order)
    numbers = {host: n for n, host in enumerate(dict.fromkeys(devices.hosts[d] for d in order))}
    parts = (
        profile.forward_seconds[:, chosen],
        profile.backward_seconds[:, chosen],
        devices.memory_bytes[chosen],
        devices.bytes_per_second[np.ix_(chosen, chosen)],
        devices.latency_seconds[np.ix_(chosen, chosen)],
        np.array([numbers[devices.hosts[d]] for d in order]),
    )
    return b"".join(np.ascontiguousarray(part).tobytes() for part in parts)
