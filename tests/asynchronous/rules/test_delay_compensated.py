"""DC-ASGD against the authors' equations."""

import numpy as np
import pytest
from rule_checks import Center, Equations, follow, start_vector

from keras_het.asynchronous.rules import DelayCompensated


class DelayCompensatedEquations(Equations):
    def __init__(self, start, rate, strength, decay):
        super().__init__(start)
        self.rate, self.strength, self.decay = rate, strength, decay
        self.backup, self.mean_square = {}, {}

    def update(self, i, g, samples, staleness):
        moved = self.c - self.backup[i] if i in self.backup else 0.0
        strength = self.strength
        if self.decay is not None:
            previous = self.mean_square.get(i, 0.0)
            self.mean_square[i] = self.decay * previous + (1 - self.decay) * g * g
            strength = strength / np.sqrt(self.mean_square[i] + 1e-7)
        self.c = self.c - self.rate * (g + strength * g * g * moved)
        self.backup[i] = self.c
        return self.c


@pytest.mark.parametrize(("strength", "decay"), [(0.4, None), (2.0, 0.95), (1.0, 0.0)])
def test_equations(strength, decay):
    start = start_vector()
    rule = DelayCompensated(0.3, strength, num_workers=3, decay=decay)
    follow(rule, DelayCompensatedEquations(start, 0.3, strength, decay), start)


def test_a_center_that_was_pulled_again_is_not_taken_for_the_last_answer():
    center = Center(DelayCompensated(0.1, 1.0, num_workers=2), np.ones(1), sizes=(1,))
    center.push(0, 1, 0, np.zeros(1))
    for _ in range(20):  # meanwhile the other worker moves the center far away
        center.push(1, 1, center.version, -np.ones(1))
    before = center.values
    center.push(0, 1, center.version, np.ones(1))  # it came back: its gradient is not stale at all
    np.testing.assert_allclose(center.values, before - 0.1, rtol=1e-6)
    moved = center.values
    center.push(1, 1, center.version - 1, np.ones(1))  # that one is, by one step
    np.testing.assert_allclose(center.values, moved - 0.1 * (1 - 0.1), rtol=1e-5)
