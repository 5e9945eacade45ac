"""DiLoCo against the authors' equations."""

import numpy as np
from rule_checks import SIZE, Group, start_vector

from keras_het.rules import DiLoCo

WORKERS = 3


def moves(step):
    return np.random.default_rng(step).normal(size=(WORKERS, SIZE))


def test_equations_with_unequal_samples(logical_devices):
    group = Group(DiLoCo(5), [start_vector()] * WORKERS)
    c, u = np.float64(start_vector()), 0.0
    for step in range(15):
        samples = np.random.default_rng(100 + step).integers(0, 64, WORKERS).astype(float)
        group.move(moves(step))
        group.exchange(samples)
        x = c + moves(step)
        gradient = (samples[:, None] * (c - x)).sum(0) / samples.sum()
        u = 0.9 * u + gradient
        c = c - 0.7 * (gradient + 0.9 * u)
        for weights in group.weights:
            np.testing.assert_allclose(weights, c, rtol=2e-4, atol=2e-4)
        np.testing.assert_array_equal(group.weights[1], group.states[1]["center"])


def test_nobody_used_a_sample(logical_devices):
    group = Group(DiLoCo(5), [start_vector()] * WORKERS)
    group.exchange([0.0] * WORKERS)
    np.testing.assert_array_equal(group.weights[0], start_vector())
