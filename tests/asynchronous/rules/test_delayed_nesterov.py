"""Delta, the sum of all changes; and delayed Nesterov, with momentum once a round of samples."""

import numpy as np
import pytest
from rule_checks import SIZE, Center, ChangeEquations, Group, follow, start_vector

from keras_het.rules import DelayedNesterov, Delta, DiLoCo

WORKERS = 3


class DeltaEquations(ChangeEquations):
    def __init__(self, start, scale):
        super().__init__(start)
        self.scale = scale

    def update(self, i, change, samples, staleness):
        self.c = self.c + self.scale * change
        return self.c


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_equations_of_delta(scale):
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


class DelayedNesterovEquations(ChangeEquations):
    def __init__(self, start, rate, momentum):
        super().__init__(start)
        self.rate, self.momentum = rate, momentum
        self.u = self.s = np.zeros(len(start))
        self.latest, self.round, self.num_rounds = {}, 0.0, 0

    def update(self, i, change, samples, staleness):
        self.latest[i] = samples
        weight = samples / (np.mean(list(self.latest.values())) * WORKERS)
        self.c = self.c + self.rate * weight * change
        self.s = self.s - weight * change
        self.round += weight
        if self.round > 1 - 1e-4:
            self.u = self.momentum * self.u + self.s
            self.c = self.c - self.rate * self.momentum * self.u
            self.s, self.round = np.zeros(len(self.s)), 0.0
            self.num_rounds += 1
        return self.c


@pytest.mark.parametrize(("rate", "momentum"), [(0.7, 0.9), (0.5, 0.0)])
def test_equations(rate, momentum):
    start = start_vector()
    equations = DelayedNesterovEquations(start, rate, momentum)
    rule = DelayedNesterov(WORKERS, learning_rate=rate, momentum=momentum)
    follow(rule, equations, start)
    assert equations.num_rounds > 3


@pytest.mark.parametrize("samples", [(8, 8, 8), (32, 16, 8)])
def test_rounds_of_equal_centers_are_steps_of_diloco(logical_devices, samples):
    start, random = start_vector(), np.random.default_rng(4)
    rule, center = DelayedNesterov(WORKERS), Center(DelayedNesterov(WORKERS), start)
    diloco = Group(DiLoCo(1), [start] * WORKERS)
    # What each worker is: the first pushes cannot know the samples of those to come.
    center.slots = [{**slots, "samples": np.float32(samples)} for slots in center.slots]
    for _ in range(4):
        before = center.values
        moved = [before + random.normal(size=SIZE).astype("float32") for _ in samples]
        for i in range(WORKERS):
            center.push(i, samples[i], center.version, rule.message(moved[i], before))
        diloco.weights = moved
        diloco.exchange(np.float32(samples))
        np.testing.assert_allclose(center.values, diloco.weights[0], rtol=1e-4, atol=1e-5)


def test_the_others_continue_while_one_is_gone_and_it_comes_back():
    rule = DelayedNesterov(WORKERS, learning_rate=1.0, momentum=0.5)
    center = Center(rule, np.zeros(SIZE))
    one = np.ones(SIZE, np.float32)

    def push(*workers):
        for i in workers:
            center.push(i, 8, center.version, one)
        return center.values[0], [float(slots["round"]) for slots in center.slots]

    moved, _ = push(0, 1, 2)
    np.testing.assert_allclose(moved, 1 + 0.5)
    moved, rounds = push(0, 1)  # the third is gone: its part of the round is missing
    np.testing.assert_allclose(moved, 1.5 + 2 / 3, rtol=1e-6)
    np.testing.assert_allclose(rounds, 2 / 3, rtol=1e-6)
    moved, rounds = push(0)  # and the others fill it
    np.testing.assert_allclose(moved, 2.5 + 0.5 * 1.5, rtol=1e-6)
    assert rounds == [0, 0, 0]
    moved, rounds = push(2)
    np.testing.assert_allclose(moved, 3.25 + 1 / 3, rtol=1e-6)


def test_a_push_without_samples_changes_nothing():
    center = Center(DelayedNesterov(WORKERS), np.zeros(SIZE))
    for samples in (0, 8, 0):
        before = center.values
        center.push(0, samples, 0, np.ones(SIZE, np.float32))
        assert (center.values != before).any() == (samples > 0)
