"""EASGD with pushes in any order, in turns, or of all at once; and the stability bound."""

import math

import numpy as np
import pytest
from keras.optimizers import SGD, Adam, LossScaleOptimizer, RMSprop
from rule_checks import SIZE, Center, ElasticEquations, Group, follow, start_vector

from keras_het.rules import (
    AsyncEASGD,
    AsyncMEASGD,
    ElasticAveraging,
    HogwildEASGD,
    RoundRobinEASGD,
    SyncEASGD,
)
from keras_het.rules.elastic_averaging import largest_moving_rate, overlapped_rate


@pytest.mark.parametrize(
    "kind", [AsyncEASGD, AsyncMEASGD, ElasticAveraging, HogwildEASGD, RoundRobinEASGD]
)
def test_equations(kind):
    start = start_vector()
    rule = kind(alpha=0.3, num_workers=3)
    assert rule.is_atomic == (kind is not HogwildEASGD)
    follow(rule, ElasticEquations(start, 0.3), start, in_turns=rule.may_wait)


def test_overlapped_exchange_is_equations_1_and_2(logical_devices):
    alpha, rate, workers = 0.2, 0.1, 4
    starts = [start_vector(i) for i in range(workers)]
    group = Group(SyncEASGD(workers, alpha, period=2, overlap=1), starts)
    x, c = np.float64(starts), np.float64(start_vector(0))
    targets = np.random.default_rng(9).normal(size=(workers, SIZE))
    for _ in range(20):
        sent = group.weights
        stepped = [w - np.float32(rate * (w - t)) for w, t in zip(sent, targets, strict=True)]
        group.exchange([1.0] * workers)
        group.receive(stepped, sent)
        gradients = x - targets
        x, c = (  # both from the same old values
            x - rate * gradients - alpha * (x - c),
            c + alpha * (x - c).sum(0),
        )
        np.testing.assert_allclose(group.weights, x, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(group.states[0]["center"], c, rtol=1e-4, atol=1e-5)


@pytest.fixture
def in_turns():
    return Center(RoundRobinEASGD(3, 0.3), start_vector())


def test_who_has_left_is_passed_over_until_it_is_back(in_turns):
    in_turns.leave(1)
    assert in_turns.are_taken(0, 2, 0, 1, 2, 0) == [True] * 3 + [False, True, True]
    assert in_turns.are_taken(2, 1, 2) == [False, True, True]
    in_turns.leave(0)  # in its turn
    assert in_turns.are_taken(1) == [True]


def test_the_turn_is_not_left_with_one_that_is_gone_when_another_returns(in_turns):
    for worker in range(3):
        in_turns.leave(worker)
    assert in_turns.are_taken(1, 1, 2, 1, 2) == [True, True, False, True, True]


def test_default_moving_rate():
    assert AsyncEASGD(num_workers=6).alpha == pytest.approx(0.15)
    assert AsyncEASGD(num_workers=1).alpha == 0.5
    assert RoundRobinEASGD(3).alpha == pytest.approx(0.3)
    assert SyncEASGD(1).alpha == 0.9 and SyncEASGD(100).alpha == pytest.approx(0.009)
    with pytest.raises(ValueError, match="neither alpha nor num_workers"):
        AsyncEASGD()
    for kind in (AsyncEASGD, RoundRobinEASGD, SyncEASGD):
        with pytest.raises(ValueError, match="num_workers must be a whole number of at least 1"):
            kind(num_workers=0)


def scaled(optimizer):
    return LossScaleOptimizer(optimizer)  # as Keras wraps it for mixed_float16


NEEDS_MOMENTUM = r"keras.optimizers.SGD\(learning_rate, momentum=0.9\).*Received: "


@pytest.mark.parametrize(
    ("rule", "make_optimizer", "match"),
    [
        (AsyncMEASGD(0.3), lambda: scaled(SGD(0.1, momentum=0.9)), None),
        (AsyncMEASGD(0.3), lambda: SGD(), NEEDS_MOMENTUM),
        (AsyncMEASGD(0.3), lambda: Adam(), NEEDS_MOMENTUM),
        (AsyncMEASGD(0.3), lambda: RMSprop(momentum=0.9), NEEDS_MOMENTUM),
        (AsyncMEASGD(0.3), lambda: scaled(SGD(0.1)), rf"{NEEDS_MOMENTUM}SGD\(momentum=0\.0\)"),
        (AsyncEASGD(0.9), lambda: SGD(0.1), None),
        (AsyncEASGD(0.9), lambda: Adam(0.1), None),  # there is no bound for it
        (AsyncEASGD(0.9), lambda: SGD(1.5), r"at most .* = 0\.4 "),
        (AsyncEASGD(0.9), lambda: scaled(SGD(1.5)), r"at most .* = 0\.4 "),
        (SyncEASGD(4, 0.3), lambda: SGD(1.5), "at most"),
    ],
)
def test_optimizers_that_fit(logical_devices, rule, make_optimizer, match):
    if match is None:
        rule.check_optimizer(make_optimizer())
    else:
        with pytest.raises(ValueError, match=match):
            rule.check_optimizer(make_optimizer())


def test_bound_is_checked_for_answers_that_travel(logical_devices):
    optimizer, rule = SGD(0.1), AsyncEASGD(0.9)
    for steps in (0, 1, 4):
        rule.check_overlap(optimizer, steps)
    with pytest.raises(ValueError, match=r"= 0\.834 for eta = 0\.5695 \(8 steps of 0\.1 while"):
        rule.check_overlap(optimizer, 8)
    with pytest.raises(ValueError, match=r"= 0\.6667 for eta = 1 \(any number of steps of 0\.1 "):
        rule.check_overlap(optimizer, math.inf)
    rule.check_overlap(Adam(0.1), 8)  # there is no bound for it
    for workers in (1, 2, 6):  # the default is within it
        for rate in (0.1, 0.5, 1.0):
            for steps in (1, 8, 100, math.inf):
                AsyncEASGD(num_workers=workers).check_overlap(SGD(rate), steps)


@pytest.mark.parametrize("rate", [0.0, 0.5, 1.0, 1.9])
def test_bound_of_the_authors(rate):
    bound = largest_moving_rate(rate)
    assert bound == pytest.approx((4 - 2 * rate) / (4 - rate))
    AsyncEASGD(bound, rate)
    with pytest.raises(ValueError, match=r"\(4 - 2 eta\) / \(4 - eta\) = "):
        AsyncEASGD(bound * 1.01 + 1e-9, rate)
    # a moving rate that is fine in turns is too much for several at once
    with pytest.raises(ValueError, match=r"\(2 \+ n \(2 - eta\)\) = 0.375 for eta = 0.5 and n = 4"):
        SyncEASGD(4, 0.38, 0.5)


def radius(alpha, rate, workers, period, overlap):
    """Largest eigenvalue of the steps and the exchange of a period, on a quadratic.

    The pull of an exchange comes after the steps that overlap it. With the mean of the workers goes
    the center; a worker's distance to the mean shrinks on its own.
    """
    step = np.diag([1 - rate, 1.0])
    pull = np.array([[-alpha, alpha], [workers * alpha, -workers * alpha]])
    matrix = np.linalg.matrix_power(step, overlap) + pull
    matrix = np.linalg.matrix_power(step, period - overlap) @ matrix
    alone = (1 - rate) ** (period - overlap) * ((1 - rate) ** overlap - alpha)
    return max(abs(np.linalg.eigvals(matrix)).max(), abs(alone) if workers > 1 else 0)


@pytest.mark.parametrize("rate", [0.1, 0.3, 0.5, 0.9, 1.0, 1.3, 1.5, 1.9])
@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_bound_is_where_the_largest_eigenvalue_passes_1(workers, rate):
    for period, overlap in ((1, 0), (1, 1), (2, 1), (2, 2), (5, 2), (10, 5), (10, 10), (50, 50)):
        bound = largest_moving_rate(overlapped_rate(rate, overlap), workers)
        SyncEASGD(workers, bound, rate, period, overlap)
        with pytest.raises(ValueError, match="at most"):
            SyncEASGD(workers, bound * 1.01 + 1e-9, rate, period, overlap)
        for part in (0.05, 0.35, 0.65, 0.95, 1.0):
            for curvature in np.linspace(0, 1, 21):
                found = radius(part * bound, rate * curvature, workers, period, overlap)
                assert found <= 1 + 1e-9
        # Exactly there, unless steps without a pull follow or some curvature has the rate 1.
        if overlap == period and (overlap == 1 or rate <= 1):
            assert radius(1.01 * bound, rate, workers, period, overlap) > 1
