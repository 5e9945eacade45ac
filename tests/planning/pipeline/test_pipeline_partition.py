"""The partition: optimal against trying everything, and honest about what does not fit."""

import numpy as np
import pytest
from exhaustive import exhaustive
from pipeline_plants import random_case

from keras_het.planning.pipeline.group_costs import KnownCosts
from keras_het.planning.pipeline.least_latency import LeastLatency
from keras_het.planning.pipeline.problem import Problem
from keras_het.planning.pipeline.search import search


def least_estimate(problem, order, tolerance=0.0):
    return search([LeastLatency(problem, order, KnownCosts(problem))], tolerance)


def random_problem(seed):
    random = np.random.default_rng(seed)
    limited = seed % 2 == 1
    units, number = int(random.integers(2, 7)), int(random.integers(1, 6))
    profile, devices = random_case(random, units, number, limited, proportional=seed % 3 == 0)
    return Problem(
        profile,
        devices,
        int(random.integers(1, 9)),
        "gpipe" if seed % 7 == 0 else "1f1b",
        ("auto", "auto", "never", "auto", "always")[seed % 5],
        profile.allowed_cuts(),
    )


def check(seed):
    problem = random_problem(seed)
    order = tuple(np.random.default_rng(seed).permutation(problem.devices.num_devices).tolist())
    best, found = exhaustive(problem, order), least_estimate(problem, order)
    if not np.isfinite(best):
        assert found.chains == ()
        return False
    assert found.chains[0][0] == pytest.approx(best, rel=1e-9)
    assert found.bound == pytest.approx(best, rel=1e-9)
    return True


@pytest.mark.parametrize("part", range(5))
def test_the_estimate_is_the_least_of_all(part):
    fit = sum(check(seed) for seed in range(part * 60, part * 60 + 60))
    assert fit > 40
