"""Recomputation: the memory formula against a replay, and the cheapest set against all sets."""

import dataclasses
import itertools

import numpy as np
import pytest
from pipeline_plants import even_devices, even_profile, random_profile

from keras_het.planning.pipeline import Stage, in_flight, routes, stage_order
from keras_het.planning.pipeline.problem import Problem
from keras_het.planning.pipeline.recomputation import (
    Memory,
    cheapest_recomputation,
    stage_memory,
)


def replayed_peak(profile, stages, position, replica):
    """Most bytes at any time, by adding and removing tensors pass by pass."""
    stage = stages[position]
    units = range(stage.first, stage.end)
    kept = sum(profile.activation_bytes[u] for u in units if u not in stage.recomputed)
    dropped = sum(profile.activation_bytes[u] for u in units if u in stage.recomputed)
    starts = sum(
        profile.cut_bytes[u]
        for u in units
        if u in stage.recomputed and (u == stage.first or u - 1 not in stage.recomputed)
    )
    held = peak = profile.state_bytes[stage.first : stage.end].sum()
    for kind, _ in stage_order(stages, position, replica):
        if kind == "forward":
            held += kept + starts
            peak = max(peak, held)
        else:
            peak = max(peak, held + dropped)
            held -= kept + starts
    return peak


@pytest.mark.parametrize("seed", range(20))
def test_the_formula_is_the_peak_of_a_replay(seed):
    random = np.random.default_rng(seed)
    profile = random_profile(random, 6, 4)
    taken = routes([1.0, random.uniform(1, 2)], 8)
    chosen = tuple(np.flatnonzero(random.random(6) < 0.5).tolist())
    stages = (
        Stage(0, 3, (0, 1), taken, tuple(u for u in chosen if u < 3)),
        Stage(3, 5, (2,), (0,) * 8, tuple(u for u in chosen if 3 <= u < 5)),
        Stage(5, 6, (3,), (0,) * 8),
    )
    for position, stage in enumerate(stages):
        for replica in range(len(stage.devices)):
            d = in_flight(stages, position, replica)
            formula = stage_memory(profile, stage.first, stage.end, d, stage.recomputed)
            assert formula == pytest.approx(replayed_peak(profile, stages, position, replica))


@pytest.mark.parametrize("seed", range(150))
def test_no_set_that_fits_is_cheaper(seed):
    random = np.random.default_rng(seed)
    units = int(random.integers(1, 9))
    profile = random_profile(random, units + 2, 1)
    first, end, d = 1, units + 1, int(random.integers(1, 6))
    seconds = profile.forward_seconds[:, 0]
    sets = [
        chosen
        for number in range(units + 1)
        for chosen in itertools.combinations(range(first, end), number)
    ]
    needed = {chosen: stage_memory(profile, first, end, d, chosen) for chosen in sets}
    limit = random.uniform(0.9 * min(needed.values()), needed[()])
    chosen = cheapest_recomputation(profile, first, end, [d], [limit], seconds)
    fitting = [units for units, held in needed.items() if held <= limit]
    if not fitting:
        assert chosen is None
        return
    assert needed[chosen] <= limit * (1 + 1e-8)
    best = min(seconds[list(units)].sum() for units in fitting)
    assert seconds[list(chosen)].sum() == pytest.approx(best)
    assert least_seconds(profile, first, end, d, limit) <= best + 1e-9


def least_seconds(profile, first, end, d, limit):
    """The lower bound for a stage on one device."""
    devices = even_devices(1, memory=limit)
    problem = Problem(profile, devices, 8, "1f1b", "auto", profile.allowed_cuts())
    lacking, part = Memory(problem).least(first, end, (0,), (d,))
    assert lacking == 0
    return part * profile.forward_seconds[first:end, 0].sum()


def test_a_hundred_units_are_nearly_exact():
    random = np.random.default_rng(3)
    profile = random_profile(random, 100, 1)
    profile = dataclasses.replace(profile, cut_bytes=np.zeros(101), gradient_bytes=np.zeros(101))
    seconds = profile.forward_seconds[:, 0]
    without = stage_memory(profile, 0, 100, 5)
    limit = profile.state_bytes.sum() + 0.5 * (without - profile.state_bytes.sum())
    chosen = cheapest_recomputation(profile, 0, 100, [5], [limit], seconds)
    assert stage_memory(profile, 0, 100, 5, chosen) <= limit * (1 + 1e-8)
    bound = least_seconds(profile, 0, 100, 5, limit)
    assert seconds[list(chosen)].sum() <= bound * 1.005


def test_one_micro_batch_in_flight_gains_nothing():
    profile = even_profile(4, 1)
    assert cheapest_recomputation(profile, 0, 4, [1], [3.9], np.ones(4)) is None
    assert cheapest_recomputation(profile, 0, 4, [1], [4.0], np.ones(4)) == ()
    assert len(cheapest_recomputation(profile, 0, 4, [2], [6.0], np.ones(4))) == 2


def test_the_strictest_replica_decides():
    profile = even_profile(4, 2)
    assert len(cheapest_recomputation(profile, 0, 4, [3, 2], [100.0, 6.0], np.ones(4))) == 2
    assert len(cheapest_recomputation(profile, 0, 4, [3, 2], [6.0, 6.0], np.ones(4))) == 3
