"""The estimate of a step and its optimum by trying everything, without the planner's search."""

from __future__ import annotations

import itertools

import numpy as np

from keras_het.planning.pipeline.recomputation import stage_memory


def stage_numbers(problem, group, first, end, window):
    """(steady, latency, all-reduce) of a stage, or None: its formulas, one number at a time."""
    profile, devices, m = problem.profile, problem.devices, problem.micro_batches
    forward = profile.forward_seconds[first:end]
    seconds = forward + profile.backward_seconds[first:end]
    if problem.recompute == "always":
        seconds = seconds + forward
    times = [float(seconds[:, device].sum()) for device in group]
    counts = [0] * len(group)
    for _ in range(m):
        ends = [(count + 1) * time for count, time in zip(counts, times, strict=True)]
        counts[int(np.argmin(np.round(ends, 12)))] += 1
    if 0 in counts:
        return None
    latency = sum(n * t for n, t in zip(counts, times, strict=True)) / m
    steady = max(n * t for n, t in zip(counts, times, strict=True)) - latency
    flights = [in_flight(problem, group, times, counts, k, window) for k in range(len(group))]
    again = least_recomputation(problem, group, first, end, flights)
    if again is None:
        return None
    factor = (latency + again) / latency
    weights = profile.weight_bytes[first:end].sum()
    return steady * factor, latency * factor, reduce_seconds(devices, group, weights)


def in_flight(problem, group, times, counts, replica, window):
    if problem.schedule == "gpipe":
        return counts[replica]
    if window <= len(group):
        return 1
    most = 1
    for c in range(2, window + 1):
        span = (c - 1) * times[replica]
        others = sum(
            int(np.floor(span / times[k] * (1 + 1e-12))) for k in range(len(group)) if k != replica
        )
        if c + others <= window:
            most = c
    return min(most, counts[replica])


def least_recomputation(problem, group, first, end, flights):
    """Least time of a set of units that makes every replica fit, of all sets."""
    profile = problem.profile
    speeds = [1 / (profile.forward_seconds + profile.backward_seconds)[:, d].sum() for d in group]
    limits = [problem.devices.memory_bytes[device] * (1 + 1e-9) for device in group]
    every = range(first, end)
    sets = {
        "auto": itertools.chain.from_iterable(
            itertools.combinations(every, n) for n in range(end - first + 1)
        ),
        "never": [()],
        "always": [tuple(every)],
    }[problem.recompute]
    best = None
    for units in sets:
        if all(
            stage_memory(profile, first, end, d, units) <= limit
            for d, limit in zip(flights, limits, strict=True)
        ):
            seconds = [sum(profile.forward_seconds[u, d] for u in units) for d in group]
            mean = np.dot(speeds, seconds) / sum(speeds)
            best = mean if best is None else min(best, mean)
    return 0.0 if problem.recompute == "always" and best is not None else best


def reduce_seconds(devices, group, num_bytes):
    if not num_bytes:
        return 0.0
    hosts = sorted({devices.hosts[d] for d in group})
    inside = [sorted(d for d in group if devices.hosts[d] == host) for host in hosts]
    fixed, moved = zip(*(ring_terms(devices, members) for members in inside), strict=True)
    between = ring_terms(devices, [members[0] for members in inside])
    return between[0] + max(fixed) + (between[1] + max(moved)) * num_bytes


def ring_terms(devices, ring):
    r = len(ring)
    if r == 1:
        return 0.0, 0.0
    pairs = list(zip(ring, ring[1:] + ring[:1], strict=True))
    latency = max(devices.latency_seconds[pair] for pair in pairs)
    rate = min(devices.bytes_per_second[pair] for pair in pairs)
    return 2 * (r - 1) * latency, 2 * (r - 1) / (r * rate)


def transfer_numbers(problem, senders, takers, cut):
    """(steady, latency) of the transfers over a cut, pair by pair."""
    devices, profile = problem.devices, problem.profile
    steady = latency = 0.0
    for num_bytes, origins, targets in (
        (profile.cut_bytes[cut], senders, takers),
        (profile.gradient_bytes[cut], takers, senders),
    ):
        fixed: dict[object, float] = {}
        per_byte: dict[object, float] = {}
        for origin, target in itertools.product(origins, targets):
            hosts = devices.hosts[origin], devices.hosts[target]
            link = hosts if hosts[0] != hosts[1] else (origin, target, "inside")
            share = 1 / (len(senders) * len(takers))
            waiting = devices.latency_seconds[origin, target] if num_bytes else 0.0
            fixed[link] = fixed.get(link, 0.0) + share * waiting
            rate = devices.bytes_per_second[origin, target]
            per_byte[link] = per_byte.get(link, 0.0) + share / rate
        latency += sum(fixed.values()) + num_bytes * sum(per_byte.values())
        busiest = max(fixed.values()) + num_bytes * max(per_byte.values())
        steady = max(steady, (problem.micro_batches - 1) * busiest)
    return steady, latency


def chains(cuts, order):
    """All stages of neighbouring units on groups of neighbours, with devices unused between."""
    last, number = len(cuts) - 1, len(order)
    for stages in range(1, min(last, number) + 1):
        for inner in itertools.combinations(range(1, last), stages - 1):
            rows = (0, *inner, last)
            for ends in itertools.combinations(range(number + stages), 2 * stages):
                # Stretch the positions so that one group may end where the next begins.
                spans = [(ends[2 * s] - s, ends[2 * s + 1] - s) for s in range(stages)]
                yield [
                    (cuts[rows[s]], cuts[rows[s + 1]], tuple(sorted(order[low:high])))
                    for s, (low, high) in enumerate(spans)
                ]


def estimate(problem, chain, known):
    """Estimated time of a step of a chain, infinite if it does not fit."""
    limited = np.isfinite(problem.devices.memory_bytes).any()
    steady = latency = reduce = 0.0
    used = sum(len(group) for _, _, group in chain)
    for number, (first, end, group) in enumerate(chain):
        key = (group, first, end, used if limited else 0)
        if key not in known:
            known[key] = stage_numbers(problem, group, first, end, used)
        numbers = known[key]
        used -= len(group)
        if numbers is None:
            return np.inf
        steady, latency = max(steady, numbers[0]), latency + numbers[1]
        reduce = max(reduce, numbers[2])
        if number:
            key = (chain[number - 1][2], group, first)
            if key not in known:
                known[key] = transfer_numbers(problem, *key)
            steady, latency = max(steady, known[key][0]), latency + known[key][1]
    return steady + latency + reduce


def exhaustive(problem, order):
    """Least estimate over all chains of an order of the devices; infinite if none fits."""
    known: dict[object, object] = {}
    return min(estimate(problem, chain, known) for chain in chains(problem.cuts, order))
