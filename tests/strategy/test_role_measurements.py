"""What `roles="auto"` makes of the steps that were measured."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from keras_het.strategy.compute_times import StepTimes
from keras_het.strategy.hybrid import role_choice
from keras_het.strategy.hybrid.role_choice import LARGEST_NOISE_SCALE, RoleChoice, noise_scale_of

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


class FakeStrategy:
    """Two workers of one device each, of which one step was measured."""

    layout = SimpleNamespace(replicas_per_worker=(1, 1))
    extended = SimpleNamespace(gather_over_workers=lambda values: values)

    def __init__(self):
        measured = [step((6, 2), (3.0, 5.0), 2.0)]
        self.compute_times = SimpleNamespace(latest=lambda count: measured)
        self.measured = []

    def measure_compute_times(self, model, gradients=False):
        self.measured.append(gradients)


@pytest.mark.parametrize("known", [None, 700.0])
def test_the_plan_is_made_for_the_noise_scale(monkeypatch, known):
    seen = []

    def advise(speeds):
        seen.append(speeds)
        return real(speeds)

    real = role_choice.advise_roles
    monkeypatch.setattr(role_choice, "advise_roles", advise)
    monkeypatch.setattr(role_choice, "measure_link_rates", lambda strategy: (1e8, 1e8))
    strategy, model = FakeStrategy(), SimpleNamespace(trainable_variables=[np.zeros([5, 2])])
    choice = RoleChoice(model, strategy, measured_steps=1, noise_scale=known)
    assert choice.steps_done(4) is None
    assert choice.steps_done(1) is not None
    assert len(seen) == 1
    assert strategy.measured == [known is None]
    # S = (6 * 3 + 2 * 5 - 8 * 2) / 1, |G|^2 = 2 * 2 - (6 * 3 + 2 * 5) / 8
    assert seen[0].noise_scale == pytest.approx(12 / 0.5 if known is None else known)
