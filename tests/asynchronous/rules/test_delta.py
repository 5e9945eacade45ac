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
def test_equations(logical_devices, scale):
    start = start_vector()
    follow(Delta(scale), DeltaEquations(start, scale), start)


def test_the_center_is_the_start_and_all_changes(logical_devices):
    rule, random, start = Delta(), np.random.default_rng(1), start_vector()
    center = Center(rule, start)
    weights, seen = [start] * 3, [start] * 3
    moved = np.zeros(SIZE)
    for _ in range(20):
        i = int(random.integers(3))
        before, during = 0.1 * random.normal(size=(2, SIZE)).astype("float32")
        sent = weights[i] + before
        answer = center.push(i, 8, center.version, rule.message(sent, seen[i]))
        # what it does while the answer travels counts too, at its next push
        weights[i] = rule.receive(rule.after_sending(sent, seen[i]) + during, sent, answer)
        seen[i] = answer
        moved += before + during
    for i in range(3):
        center.push(i, 8, center.version, rule.message(weights[i], seen[i]))
    np.testing.assert_allclose(center.values, start + moved, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("scale", "moves"), [(1.0, 1.0), (0.25, 1.0), (0.1, 0.4)])
def test_what_all_learnt_alone_counts_once(logical_devices, scale, moves):
    rule, start = Delta(scale), start_vector()
    center = Center(rule, start)
    learnt = np.random.default_rng(2).normal(size=SIZE).astype("float32")
    for i in range(4):
        own = rule.after_absence(start + learnt, start, 4)
        center.push(i, 8, 0, rule.message(own, start))
    np.testing.assert_allclose(center.values, start + moves * learnt, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scale", [0, -1.0])
def test_wrong_scale(scale):
    with pytest.raises(ValueError, match="scale must be positive"):
        Delta(scale)


def test_small_steps_count_by_their_samples():
    """Ten steps of a half batch move the center as five of the whole one with a constant slope."""
    rule, slope, rate = Delta(), np.float32(3.0), np.float32(0.1)
    half = rule.for_steps_of(0.5)
    start = start_vector()
    moved = half.message(start - 10 * rate * slope, start)
    np.testing.assert_allclose(moved, rule.message(start - 5 * rate * slope, start), rtol=1e-5)
    assert rule.step_fraction == 1.0
    assert half.get_config() == rule.get_config()
