"""Made models and clusters for tests of the pipeline's planner."""

from __future__ import annotations

import numpy as np

from keras_het.planning.pipeline import Devices, ModelProfile


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
