"""Samples of a push and its learning rate: numbers by hand, and what must hold for all."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_het.planning.roles.push_rates import (
    accumulated_samples,
    learning_rate_factor,
    plan_pushes,
    warm_up,
)

PUSHERS = st.lists(
    st.tuples(st.floats(0.5, 500), st.integers(1, 64), st.floats(0, 5)), min_size=1, max_size=6
)


def test_samples_in_proportion_to_speed_by_hand():
    # Batches of 8 take 0.02, 0.04 and 0.08 s; all can push every 0.08 s.
    plan = plan_pushes([400.0, 200.0, 100.0], [8, 8, 8], [0.0, 0.0, 0.0])
    assert plan.target_seconds == pytest.approx(0.08)
    assert plan.samples == (32, 16, 8)
    assert plan.push_seconds == pytest.approx((0.08, 0.08, 0.08))
    assert plan.samples_per_second == pytest.approx((400.0, 200.0, 100.0))
    assert plan.staleness == pytest.approx((2.0, 2.0, 2.0))


def test_a_slow_link_lengthens_everyones_time_between_pushes():
    # Overlapped: an exchange of 0.5 s hides behind 50 samples at 100 a second, 52 in fours.
    plan = plan_pushes([800.0, 100.0], [16, 4], [0.0, 0.5])
    assert plan.target_seconds == 0.5
    assert plan.samples == (400, 52)
    assert plan.push_seconds == pytest.approx((0.5, 0.52))
    assert plan.age_seconds == pytest.approx((0.5, 1.02))
    assert plan.staleness == pytest.approx((0.5 / 0.52, 1.02 / 0.5))


def test_without_overlap_the_exchange_is_paid():
    # 0.5 s of exchange and 0.04 s of computation
    plan = plan_pushes([800.0, 100.0], [16, 4], [0.0, 0.5], overlapped=False)
    assert plan.target_seconds == pytest.approx(0.54)
    assert plan.samples == (432, 4)
    assert plan.samples_per_second == pytest.approx((800.0, 4 / 0.54))


def test_the_number_of_batches_that_is_nearest_in_ratio():
    assert accumulated_samples(1.0, 10, 14.0) == 10  # 14 / 10 < 20 / 14
    assert accumulated_samples(1.0, 10, 14.2) == 20  # 14.2 / 10 > 20 / 14.2
    assert accumulated_samples(1.0, 10, 3.0) == 10  # never less than a batch
    assert accumulated_samples(1.0, 10, 10.0, exchange_seconds=30.0) == 30
    # 6 + 10 = 16 s and 6 + 20 = 26 s: 20 is nearer to 16 (ratio 1.25) than to 26 (ratio 1.3)
    assert accumulated_samples(1.0, 10, 20.0, 6.0, overlapped=False) == 10
    assert accumulated_samples(1.0, 10, 21.0, 6.0, overlapped=False) == 20


@given(pushers=PUSHERS, target=st.none() | st.floats(0.01, 20), overlapped=st.booleans())
def test_everyone_pushes_as_near_to_the_target_as_batches_allow(pushers, target, overlapped):
    speeds, batches, exchanges = zip(*pushers, strict=True)
    plan = plan_pushes(speeds, batches, exchanges, target, overlapped)
    for i, (speed, batch, exchange) in enumerate(pushers):
        assert plan.samples[i] >= batch and plan.samples[i] % batch == 0
        seconds = plan.push_seconds[i]
        if overlapped:
            # it never waits for its link
            assert plan.samples_per_second[i] == pytest.approx(speed)
        shortest = batch / speed + (0.0 if overlapped else exchange)
        if overlapped and exchange > plan.target_seconds:
            assert exchange * (1 - 1e-8) <= seconds <= exchange + batch / speed * (1 + 1e-8)
        elif shortest >= plan.target_seconds:
            assert seconds == pytest.approx(max(shortest, exchange if overlapped else 0.0))
        else:
            off = max(seconds / plan.target_seconds, plan.target_seconds / seconds)
            k = plan.samples[i] // batch
            if not overlapped or exchange <= 0:
                assert off <= math.sqrt(1 + 1 / max(1, k - 1)) + 1e-6
            assert off <= 1 + 1 / max(1, k - 1) + 1e-6


@given(n=st.integers(1, 8), speed=st.floats(0.5, 500), batch=st.integers(1, 64))
def test_equal_workers_are_as_stale_as_there_are_others(n, speed, batch):
    plan = plan_pushes([speed] * n, [batch] * n, [0.0] * n)
    assert plan.staleness == pytest.approx([n - 1] * n)


def test_learning_rate_by_hand():
    assert learning_rate_factor(64, 64) == 1.0
    assert learning_rate_factor(32, 64) == 0.5
    assert learning_rate_factor(256, 64) == 4.0
    assert learning_rate_factor(256, 64, staleness=1) == 4.0
    assert learning_rate_factor(256, 64, staleness=8) == 0.5
    # 4 times the base, reached in a line over 100 pushes
    assert learning_rate_factor(256, 64, version=0, warm_up_pushes=100) == 1.0
    assert learning_rate_factor(256, 64, version=50, warm_up_pushes=100) == 2.5
    assert learning_rate_factor(256, 64, version=100, warm_up_pushes=100) == 4.0
    assert learning_rate_factor(256, 64, 5, 50, 100) == 0.5
    # nothing was raised, so there is nothing to warm up
    assert learning_rate_factor(32, 64, version=0, warm_up_pushes=100) == 0.5


@given(scale=st.floats(0.01, 100), version=st.integers(0, 300), pushes=st.integers(0, 200))
def test_warm_up_rises_to_one(scale, version, pushes):
    now, later = warm_up(scale, version, pushes), warm_up(scale, version + 1, pushes)
    assert min(1.0, 1 / scale) - 1e-12 <= now <= later + 1e-12 <= 1 + 1e-11
    assert warm_up(scale, max(version, pushes), pushes) == 1.0


@given(samples=st.integers(1, 1000), staleness=st.floats(0, 100), version=st.integers(0, 100))
def test_more_staleness_never_raises_the_learning_rate(samples, staleness, version):
    now = learning_rate_factor(samples, 64, staleness, version, 50)
    assert 0 < learning_rate_factor(samples, 64, staleness + 1, version, 50) <= now
    assert now <= samples / 64
    if staleness >= 1:
        fresh = learning_rate_factor(samples, 64, 0, version, 50)
        assert now * staleness == pytest.approx(fresh)


def test_what_cannot_be_planned_is_refused():
    with pytest.raises(ValueError, match=r"`samples_per_second` must be greater than 0"):
        plan_pushes([0.0], [1], [0.0])
    with pytest.raises(ValueError, match=r"2 speeds, 1 batches and 2 times"):
        plan_pushes([1.0, 1.0], [1], [0.0, 0.0])
    with pytest.raises(ValueError, match=r"0 speeds"):
        plan_pushes([], [], [])
    with pytest.raises(ValueError, match=r"Received: batch_samples=0"):
        accumulated_samples(1.0, 0, 1.0)
    with pytest.raises(ValueError, match=r"`exchange_seconds` must be finite"):
        accumulated_samples(1.0, 1, 1.0, -1.0)
    with pytest.raises(ValueError, match=r"`target_seconds` must be finite"):
        accumulated_samples(1.0, 1, math.inf)
    with pytest.raises(ValueError, match=r"`samples` must be greater than 0"):
        learning_rate_factor(0, 64)
    with pytest.raises(ValueError, match=r"`staleness` must be finite"):
        learning_rate_factor(1, 64, staleness=math.nan)
    with pytest.raises(TypeError, match=r"`reference_samples` must be a real number"):
        learning_rate_factor(1, "64")
