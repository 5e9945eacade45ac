"""EASGD with pushes in any order: Async, momentum, Hogwild; and the stability bound."""

import math

import keras
import numpy as np
import pytest
from rule_checks import ElasticEquations, follow, run_in_threads, start_vector

from keras_het.asynchronous.rules import (
    AsyncEASGD,
    AsyncMEASGD,
    ElasticAveraging,
    HogwildEASGD,
    PushMeta,
    RoundRobinEASGD,
    SyncEASGD,
)
from keras_het.asynchronous.rules.elastic_averaging import largest_moving_rate, overlapped_rate

RULES = [AsyncEASGD, AsyncMEASGD, ElasticAveraging, HogwildEASGD]


@pytest.mark.parametrize("kind", RULES)
def test_equations(kind):
    start = start_vector()
    follow(kind(alpha=0.3), ElasticEquations(start, 0.3), start)


def test_what_distinguishes_them():
    assert [rule.is_atomic for rule in RULES] == [True, True, True, False]
    assert not any(rule.center_is_weights or rule.uses_gradients for rule in RULES)


def test_simultaneous_pushes_without_a_lock():
    rule, center, ones = HogwildEASGD(0.1), np.zeros(20000, np.float32), np.ones(20000, np.float32)

    def work(number):
        for _ in range(50):
            answer = rule.update(center, {}, ones, PushMeta(number, 1.0, 0)).answer
            assert 0 <= answer.min() <= answer.max() <= 1.5

    run_in_threads(work, 4)
    # whatever was lost to races, 50 pushes of one worker alone leave 0.9 ** 50 = 0.5 %
    np.testing.assert_allclose(center, ones, atol=0.05)


def test_default_moving_rate():
    assert AsyncEASGD(num_workers=6).alpha == pytest.approx(0.15)
    assert AsyncEASGD(num_workers=1).alpha == 0.5
    assert RoundRobinEASGD(3).alpha == pytest.approx(0.3)
    assert SyncEASGD(1).alpha == 0.9 and SyncEASGD(100).alpha == pytest.approx(0.009)
    with pytest.raises(ValueError, match="neither alpha nor num_workers"):
        AsyncEASGD()
    for kind in (AsyncEASGD, RoundRobinEASGD, SyncEASGD):
        with pytest.raises(ValueError, match="num_workers must be at least 1"):
            kind(num_workers=0)


@pytest.mark.parametrize(
    ("name", "settings"), [("SGD", {}), ("Adam", {}), ("RMSprop", {"momentum": 0.9})]
)
def test_momentum_form_names_the_optimizer_it_needs(logical_devices, name, settings):
    optimizer = getattr(keras.optimizers, name)(**settings)
    with pytest.raises(ValueError, match=r"keras.optimizers.SGD\(learning_rate, momentum=0.9\)"):
        AsyncMEASGD(0.3).check_optimizer(optimizer)


def test_bound_is_checked_for_the_optimizer_too(logical_devices):
    rule = AsyncEASGD(0.9)
    rule.check_optimizer(keras.optimizers.SGD(0.1))
    rule.check_optimizer(keras.optimizers.Adam(0.1))  # there is no bound for it
    with pytest.raises(ValueError, match=r"at most .* = 0\.4 "):
        rule.check_optimizer(keras.optimizers.SGD(1.5))


def test_bound_is_checked_for_answers_that_travel(logical_devices):
    optimizer = keras.optimizers.SGD(0.1)
    rule = AsyncEASGD(0.9)
    for steps in (0, 1, 4):
        rule.check_overlap(optimizer, steps)
    with pytest.raises(ValueError, match=r"= 0\.834 for eta = 0\.5695 \(8 steps of 0\.1 while"):
        rule.check_overlap(optimizer, 8)
    with pytest.raises(ValueError, match=r"= 0\.6667 for eta = 1 \(any number of steps of 0\.1 "):
        rule.check_overlap(optimizer, math.inf)
    rule.check_overlap(keras.optimizers.Adam(0.1), 8)  # there is no bound for it


@pytest.mark.parametrize("workers", [1, 2, 6])
def test_the_default_is_within_the_bound_however_long_an_answer_takes(logical_devices, workers):
    rule = AsyncEASGD(num_workers=workers)
    for rate in (0.1, 0.5, 1.0):
        for steps in (1, 8, 100, math.inf):
            rule.check_overlap(keras.optimizers.SGD(rate), steps)


@pytest.mark.parametrize("rate", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("steps", [1, 2, 8, 50])
def test_bound_of_answers_that_travel_is_where_the_largest_eigenvalue_passes_1(rate, steps):
    def radius(alpha):
        """One worker alone: it moves by the difference at the time of sending, after its steps."""
        stays = (1 - rate) ** steps
        return abs(np.linalg.eigvals([[stays - alpha, alpha], [alpha, 1 - alpha]])).max()

    bound = largest_moving_rate(overlapped_rate(rate, steps))
    assert radius(bound) <= 1 + 1e-12 < radius(1.01 * bound)


def test_an_optimizer_that_scales_the_loss_is_seen_through(logical_devices):
    def scaled(optimizer):  # as Keras wraps it for mixed_float16
        return keras.optimizers.LossScaleOptimizer(optimizer)

    AsyncMEASGD(0.3).check_optimizer(scaled(keras.optimizers.SGD(0.1, momentum=0.9)))
    with pytest.raises(ValueError, match=r"Received: SGD\(momentum=0\.0\)"):
        AsyncMEASGD(0.3).check_optimizer(scaled(keras.optimizers.SGD(0.1)))
    with pytest.raises(ValueError, match=r"at most .* = 0\.4 "):
        AsyncEASGD(0.9).check_optimizer(scaled(keras.optimizers.SGD(1.5)))


@pytest.mark.parametrize("rate", [0.0, 0.5, 1.0, 1.9])
def test_bound(rate):
    bound = largest_moving_rate(rate)
    assert bound == pytest.approx((4 - 2 * rate) / (4 - rate))
    AsyncEASGD(bound, rate)
    with pytest.raises(ValueError, match=r"\(4 - 2 eta\) / \(4 - eta\) = "):
        AsyncEASGD(bound * 1.01 + 1e-9, rate)


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
@pytest.mark.parametrize("rate", [0.1, 0.5, 1.0, 1.5, 1.9])
@pytest.mark.parametrize("at_once", [True, False])
def test_bound_is_where_the_largest_eigenvalue_passes_1(workers, rate, at_once):
    def radius(alpha):
        # mean of the workers and center; a worker's distance to the mean shrinks on its own
        step = np.array([[1 - rate, 0.0], [0.0, 1.0]])
        pull = np.array([[-alpha, alpha], [workers * alpha, -workers * alpha]])
        matrix = step + pull if at_once else (np.eye(2) + pull) @ step
        alone = 1 - rate - alpha if at_once else (1 - alpha) * (1 - rate)
        return max(abs(np.linalg.eigvals(matrix)).max(), abs(alone) if workers > 1 else 0)

    bound = largest_moving_rate(rate, workers)
    for part in np.linspace(0.05, 1, 20):
        assert radius(part * bound) <= 1 + 1e-12
    if at_once:  # exactly the bound; an exchange after the step is stable beyond it
        assert radius(1.01 * bound) > 1
