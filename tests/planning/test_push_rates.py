"""Samples of a push: numbers by hand, and what must hold for all."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_het.planning import plan_pushes

PUSHERS = st.lists(
    st.tuples(st.floats(0.5, 500), st.integers(1, 64), st.floats(0, 5)), min_size=1, max_size=6
)


def test_samples_in_proportion_to_speed_by_hand():
    # Batches of 8 take 0.02, 0.04 and 0.08 s; all can push every 0.08 s.
    plan = plan_pushes([400.0, 200.0, 100.0], [8, 8, 8], [0.0, 0.0, 0.0])
    assert plan.target_seconds == pytest.approx(0.08)
    assert plan.samples == (32, 16, 8)
    assert plan.push_seconds == pytest.approx((0.08, 0.08, 0.08))


def test_a_slow_link_lengthens_everyones_time_between_pushes():
    # Half an exchange of 0.5 s hides behind 25 samples at 100 a second, 28 in fours.
    plan = plan_pushes([800.0, 100.0], [16, 4], [0.0, 0.5])
    assert plan.target_seconds == 0.25
    assert plan.samples == (208, 28)
    assert plan.push_seconds == pytest.approx((0.26, 0.5))


@pytest.mark.parametrize(("exchange", "samples"), [(0.5, 8), (2.0, 8), (2.1, 16), (4.2, 24)])
def test_it_waits_for_its_link_as_long_as_it_computes_at_most(exchange, samples):
    assert plan_pushes([8.0], [8], [exchange]).samples == (samples,)


@pytest.mark.parametrize(("slowest", "samples"), [(14, 10), (14.2, 20), (10, 10), (30, 30)])
def test_the_number_of_batches_that_is_nearest_in_ratio(slowest, samples):
    # 14 / 10 < 20 / 14 and 14.2 / 10 > 20 / 14.2
    assert plan_pushes([1.0, 1.0], [10, 1], [0.0, 2 * slowest]).samples[0] == samples


def test_the_slowest_takes_the_batches_that_it_is_to_take_at_least():
    plan = plan_pushes([400.0, 200.0, 100.0], [8, 8, 8], [0.0, 0.0, 0.0], least_batches=50)
    assert plan.samples == (1600, 800, 400)
    # a link may need longer than that
    plan = plan_pushes([800.0, 100.0], [16, 4], [0.0, 1.0], least_batches=12)
    assert plan.samples == (400, 52)


@given(pushers=PUSHERS)
def test_everyone_pushes_as_near_to_the_target_as_batches_allow(pushers):
    speeds, batches, exchanges = zip(*pushers, strict=True)
    plan = plan_pushes(speeds, batches, exchanges)
    for i, (speed, batch, exchange) in enumerate(pushers):
        assert plan.samples[i] >= batch and plan.samples[i] % batch == 0
        seconds = plan.samples[i] / speed
        assert plan.push_seconds[i] == pytest.approx(max(seconds, exchange))
        assert exchange <= 2 * seconds * (1 + 1e-6)
        off = max(seconds / plan.target_seconds, plan.target_seconds / seconds)
        k = plan.samples[i] // batch
        if exchange <= 0:
            assert off <= math.sqrt(1 + 1 / max(1, k - 1)) + 1e-6
        assert off <= 1 + 1 / max(1, k - 1) + 1e-6


def test_what_cannot_be_planned_is_refused():
    with pytest.raises(ValueError, match=r"speed above 0 .* Received: samples_per_second=0.0"):
        plan_pushes([0.0], [1], [0.0])
    with pytest.raises(ValueError, match=r"2 speeds, 1 batches and 2 times"):
        plan_pushes([1.0, 1.0], [1], [0.0, 0.0])
    with pytest.raises(ValueError, match=r"0 speeds"):
        plan_pushes([], [], [])
    with pytest.raises(ValueError, match=r"batch_samples=0"):
        plan_pushes([1.0], [0], [1.0])
    with pytest.raises(ValueError, match=r"`exchange_seconds` must be finite"):
        plan_pushes([1.0], [1], [-1.0])
    with pytest.raises(ValueError, match=r"least_batches .* at least 1. Received: .*=0"):
        plan_pushes([1.0], [1], [0.0], least_batches=0)
    with pytest.raises(TypeError, match=r"`samples_per_second` must be a real number"):
        plan_pushes(["64"], [1], [0.0])
