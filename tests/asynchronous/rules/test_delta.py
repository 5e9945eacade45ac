"""Delta: the center is the sum of all changes."""

import numpy as np
import pytest
from rule_checks import SIZE, Center, ChangeEquations, follow, start_vector

from keras_het.asynchronous.rules import Delta


class DeltaEquations(ChangeEquations):
    def __init__(self, start, scale):
        super().__init__(start)
        self.scale = scale

    def update(self, i, change, samples, staleness):
        self.c = self.c + self.scale * change
        return self.c


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_equations(scale):
    start = start_vector()
    follow(Delta(scale), DeltaEquations(start, scale), start)


@pytest.mark.parametrize(("scale", "moves"), [(1.0, 1.0), (0.25, 1.0), (0.1, 0.4)])
def test_what_all_learnt_alone_counts_once(scale, moves):
    rule, start = Delta(scale), start_vector()
    center = Center(rule, start)
    learnt = np.random.default_rng(2).normal(size=SIZE).astype("float32")
    for i in range(4):
        own = rule.after_absence(start + learnt, start, 4)
        center.push(i, 8, 0, rule.message(own, start))
    np.testing.assert_allclose(center.values, start + moves * learnt, rtol=1e-4, atol=1e-5)


def test_small_steps_count_by_their_samples():
    """Ten steps of a half batch move the center as five of the whole one with a constant slope."""
    rule, slope, rate = Delta(), np.float32(3.0), np.float32(0.1)
    half = rule.for_steps_of(0.5)
    start = start_vector()
    moved = half.message(start - 10 * rate * slope, start)
    np.testing.assert_allclose(moved, rule.message(start - 5 * rate * slope, start), rtol=1e-5)
    assert rule.step_fraction == 1.0
    assert half.get_config() == rule.get_config()
