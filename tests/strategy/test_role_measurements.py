"""What `roles="auto"` makes of the steps that were measured."""

from __future__ import annotations

import numpy as np
import pytest

from keras_het.strategy.compute_times import StepTimes
from keras_het.strategy.hybrid.role_choice import LARGEST_NOISE_SCALE, noise_scale_of

DIMENSIONS = 50


def steps(count, shares, gradient, deviation):
    """Steps whose samples have gradients of one mean and of independent, equal deviations."""
    random = np.random.default_rng(0)
    for _ in range(count):
        own = [gradient + random.normal(0, deviation / np.sqrt(b), DIMENSIONS) for b in shares]
        mean = np.average(own, axis=0, weights=shares)
        yield step(shares, [g @ g for g in own], mean @ mean)


def step(shares, squares, global_square):
    return StepTimes(
        shares=np.array(shares),
        mean_shares=np.array(shares, float),
        seconds=np.ones(len(shares)),
        wanted_shares=np.zeros(len(shares), int),
        gradient_squares=np.array(squares, float),
        global_gradient_square=float(global_square),
        wanted_batch=0,
        rate_factor=1.0,
    )


@pytest.mark.parametrize("shares", [(8, 8), (20, 4, 8)])
def test_noise_scale_of_known_gradients(shares):
    gradient = np.full(DIMENSIONS, 0.1)
    expected = DIMENSIONS * 0.5**2 / (gradient @ gradient)
    measured = noise_scale_of(list(steps(4000, shares, gradient, 0.5)))
    assert measured == pytest.approx(expected, rel=0.1)


def test_a_gradient_below_its_noise_makes_staleness_free():
    # |G|^2 = 2 |g|^2 - (|g_1|^2 + |g_2|^2) / 2 < 0
    assert noise_scale_of([step((4, 4), (1.0, 1.0), 0.4)]) == LARGEST_NOISE_SCALE


def test_one_replica_shows_no_noise():
    assert noise_scale_of(list(steps(3, (8,), np.ones(DIMENSIONS), 1.0))) is None
