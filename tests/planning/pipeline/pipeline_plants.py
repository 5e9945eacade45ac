"""Made models and clusters for tests of the pipeline's planner."""

from __future__ import annotations

import dataclasses

import numpy as np

from keras_het.planning.pipeline import Devices, ModelProfile
from keras_het.planning.pipeline.problem import Problem


def random_profile(random, units, devices, proportional=False):
    base = random.uniform(0.5, 2, units)
    speed = random.choice([1.0, 2.0, 4.0], devices)
    forward = base[:, None] / speed
    if not proportional:
        forward = forward * random.uniform(0.7, 1.3, (units, devices))
    backward = forward * random.uniform(1, 2.5, (units, 1))
    cuts = random.exponential(1, units + 1) * (random.random(units + 1) < 0.9)
    cuts[[0, -1]] = 0
    weights = random.exponential(1, units) * (random.random(units) < 0.8)
    return ModelProfile(
        tuple(f"layer_{n}" for n in range(units)),
        forward,
        backward,
        random.uniform(0.2, 2, units),
        weights,
        3 * weights,
        cuts,
        cuts * random.choice([0.0, 1.0], units + 1, p=[0.1, 0.9]),
    )


def random_devices(random, number, memory=None):
    hosts = np.sort(random.integers(0, max(2, number // 2), number))
    slow = random.uniform(0.2, 4)
    rates = np.where(hosts[:, None] == hosts, 20.0, slow * random.uniform(0.5, 1, (number, number)))
    np.fill_diagonal(rates, np.inf)
    latency = np.where(hosts[:, None] == hosts, 0.0, random.uniform(0, 0.1))
    limits = np.full(number, np.inf) if memory is None else np.broadcast_to(memory, number)
    names = tuple(f"worker {host} GPU:{n}" for n, host in enumerate(hosts))
    return Devices(names, tuple(hosts.tolist()), rates, latency, limits)


def random_case(random, units, devices, limited, proportional=False):
    profile = random_profile(random, units, devices, proportional)
    whole = profile.state_bytes.sum() + profile.activation_bytes.sum()
    memory = random.uniform(0.3, 1.2, devices) * whole if limited else None
    return profile, random_devices(random, devices, memory)


def even_profile(units, devices, seconds=1.0, cut=0.0, weights=0.0):
    """Units that all take a third of the time forward and two thirds backward."""
    cuts = np.full(units + 1, cut)
    cuts[[0, -1]] = 0
    return ModelProfile(
        tuple(f"layer_{n}" for n in range(units)),
        np.full((units, devices), seconds / 3),
        np.full((units, devices), seconds * 2 / 3),
        np.ones(units),
        np.full(units, weights),
        3 * np.full(units, weights),
        cuts,
        cuts,
    )


def even_devices(number, hosts=None, rate=1.0, latency=0.0, memory=np.inf):
    hosts = tuple(range(number)) if hosts is None else hosts
    rates = np.full((number, number), rate)
    np.fill_diagonal(rates, np.inf)
    return Devices(
        tuple(f"worker {host} GPU:{n}" for n, host in enumerate(hosts)),
        hosts,
        rates,
        np.full((number, number), latency) * ~np.eye(number, dtype=bool),
        np.broadcast_to(memory, number),
    )


def random_problem(seed):
    """A problem of few units, of some, or of many; memory is limited in half of them."""
    random = np.random.default_rng([seed, 7])
    most_units, most_devices = ((6, 4), (6, 4), (6, 4), (29, 6), (29, 6), (120, 8))[seed % 6]
    units = int(random.integers(2 if most_units == 6 else most_units // 4, most_units + 1))
    number = int(random.integers(1, most_devices + 1))
    profile = random_profile(random, units, number, proportional=random.random() < 0.4)
    weights = profile.weight_bytes * random.choice([0.3, 1.0, 4.0]) * 6 / units
    profile = dataclasses.replace(
        profile,
        forward_seconds=profile.forward_seconds * 6 / units,
        backward_seconds=profile.backward_seconds * 6 / units,
        activation_bytes=profile.activation_bytes * 6 / units,
        weight_bytes=weights,
        state_bytes=3 * weights,
        cut_bytes=profile.cut_bytes * (thin := random.choice([0.03, 0.1, 0.3, 1.0, 1.0, 1.0])),
        gradient_bytes=profile.gradient_bytes * thin,
    )
    memory = None
    if random.integers(2):
        whole = profile.state_bytes.sum() + profile.activation_bytes.sum()
        least, most = (0.3, 1.2) if random.random() < 0.6 else (1 / number, 2 / number)
        memory = random.uniform(least, most, number) * whole
    devices = random_devices(random, number, memory)
    hosts = np.array(devices.hosts)
    if random.random() < 0.3:
        hosts = random.permutation(hosts)
    # Hosts behind unlike links.
    rates = random.uniform(0.2, 4) * random.choice([0.25, 0.5, 1.0, 1.0], number + 1)[hosts]
    inside, away = random.choice([5.0, 20.0, np.inf]), random.uniform(0, 0.1)
    same = hosts[:, None] == hosts
    between = np.where(same, inside, np.minimum.outer(rates, rates))
    np.fill_diagonal(between, np.inf)
    devices = dataclasses.replace(
        devices,
        hosts=tuple(hosts.tolist()),
        bytes_per_second=between,
        latency_seconds=np.where(same, 0.0, away),
    )
    return Problem(
        profile,
        devices,
        int(random.choice([2, 4, 8, 8, 16, 32])),
        str(random.choice(["1f1b"] * 6 + ["gpipe"])),
        str(random.choice(["auto"] * 6 + ["never", "always"])),
        profile.allowed_cuts(),
    )
