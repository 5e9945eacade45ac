"""Predicted samples per second of given roles, by hand."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_het.planning.roles.exchange_settings import (
    ExchangeSettings,
    Pusher,
    mean_age_in_periods,
    periods_of,
)
from keras_het.planning.roles.roles import (
    ClusterSpeeds,
    predict_hybrid,
    predict_sync,
    statistical_efficiency,
)


def test_a_sync_group_by_hand():
    cluster = ClusterSpeeds((100.0, 50.0), (1000.0, 100.0), 500, 100)
    both = predict_sync(cluster, [1, 0])
    assert both.mode == "balanced" and both.roles == ("sync", "sync")
    assert both.step_seconds == pytest.approx(0.67 + 500 / 100)  # 67:33 samples, ring of 2
    # shares and pushes are those of the training that starts: it would not take them from here
    assert not {field.name for field in dataclasses.fields(both)} & {"shares", "pushed_samples"}
    assert both.samples_per_second == both.effective_samples_per_second
    assert both.samples_per_second == pytest.approx(100 / 5.67)
    one = predict_sync(cluster, [0])
    assert one.mode == "leave_out" and one.roles == ("sync", "out")
    assert one.step_seconds == pytest.approx(1.0)
    three = ClusterSpeeds((100.0,) * 3, (1000.0, 400.0, 800.0), 600, 30, (0.5, 0.5, 0.5))
    # 0.5 + 10 / 100 and 2 * 2 / 3 * 600 / 400
    assert predict_sync(three, range(3)).step_seconds == pytest.approx(0.6 + 2.0)
    far = dataclasses.replace(three, hop_seconds=0.25)
    assert predict_sync(far, range(3)).step_seconds == pytest.approx(0.6 + 2.0 + 4 * 0.25)
    assert predict_sync(far, [0]).step_seconds == predict_sync(three, [0]).step_seconds


def test_hops_are_what_an_all_reduce_takes_beside_its_bytes():
    three = ClusterSpeeds((100.0,) * 3, (1000.0, 400.0, 800.0), 600, 30, hop_seconds=9.0)
    measured = three.with_all_reduce_of(3.0)  # of which 2 for the bytes, as above
    assert measured.hop_seconds == pytest.approx(0.25)
    assert dataclasses.replace(measured, hop_seconds=9.0) == three
    assert three.with_all_reduce_of(1.9).hop_seconds == 0.0
    assert ClusterSpeeds((1.0,), (1.0,), 1, 1).with_all_reduce_of(3.0).hop_seconds == 0.0


def beside_one(**exchange):
    """A worker behind a slow link beside a group of one, whose batches it takes whole."""
    settings = ExchangeSettings(period=2, busy_seconds=0.5, **exchange)
    cluster = ClusterSpeeds(
        (100.0, 50.0), (1000.0, 100.0), 500, 100, noise_scale=900.0, exchange=settings
    )
    hybrid = predict_hybrid(cluster, predict_sync(cluster, [0]), [1])
    assert hybrid.mode == "hybrid" and hybrid.roles == ("sync", "async")
    assert hybrid.step_seconds == pytest.approx(1.25)  # half an exchange; nobody waits
    return hybrid


def test_an_async_worker_behind_a_slow_link_by_hand():
    hybrid = beside_one()
    # two batches of 2 s do not hide 5 s of travel, and 0.5 s it is busy itself
    worker = 200 / 5.5
    assert hybrid.samples_per_second == pytest.approx(80.0 + worker)
    # its own batch, and what the other computes in the group's 2.5 s or in two periods of 5.5 s
    unseen, stale = 100 + worker * 2.5, 100 + 80 * 11
    expected = 80 * 1000 / (900 + unseen) + worker * 1000 / (900 + stale)
    assert hybrid.effective_samples_per_second == pytest.approx(expected)


def test_a_worker_that_sends_gradients_waits_for_its_answer():
    hybrid = beside_one(sends_gradients=True)
    worker = 200 / 9.5
    assert hybrid.samples_per_second == pytest.approx(80.0 + worker)
    # all steps of a period are taken from the same weights, and sent after it
    unseen, stale = 200 + worker * 2.5, 200 + 80 * 9.5
    expected = 80 * 1000 / (900 + unseen) + worker * 1000 / (900 + stale)
    assert hybrid.effective_samples_per_second == pytest.approx(expected)


@pytest.mark.parametrize(
    ("travel", "period", "age"),
    [(0.0, 1, 2.0), (0.0, 2, 1.5), (0.0, 8, 1.125), (2.5, 8, 1.375), (2.0, 8, 1.25), (9.0, 8, 2.0)],
)
def test_an_answer_is_taken_after_the_step_in_which_it_comes(travel, period, age):
    """Steps until then start from a center that is a period older; the others do not."""
    worker = Pusher(10.0, 1.0, travel, 0.0, 1)
    assert mean_age_in_periods(ExchangeSettings(), worker, period) == pytest.approx(age)
    waits = ExchangeSettings(sends_gradients=True)
    assert mean_age_in_periods(waits, worker, period) == 1


def test_longer_periods_cost_less_and_are_staler():
    def rates(period):
        settings = ExchangeSettings(period=period, busy_seconds=0.1)
        cluster = ClusterSpeeds((100.0, 50.0), (1e9, 1e9), 500, 100, exchange=settings)
        hybrid = predict_hybrid(cluster, predict_sync(cluster, [0]), [1])
        return hybrid.samples_per_second, hybrid.effective_samples_per_second

    (often, fresh), (seldom, stale) = rates(1), rates(8)
    assert often == pytest.approx(100 / 1.1 + 100 / 2.1)
    assert seldom == pytest.approx(800 / 8.1 + 800 / 16.1)
    assert fresh / often > stale / seldom


def test_async_workers_share_what_the_all_reduce_leaves():
    settings = ExchangeSettings(period=1, sends_gradients=True)
    cluster = ClusterSpeeds((100.0, 100.0, 20.0, 20.0), (1000.0,) * 4, 500, 100, exchange=settings)
    group = predict_sync(cluster, [0, 1])
    assert group.step_seconds == pytest.approx(1.0)  # half of it at full rate
    # of 1000 bytes/s 500 are left: 1 s for one worker, 2 s for each of two, after 50 samples; the
    # group has one all-reduce more for its exchange
    one, both = predict_hybrid(cluster, group, [2]), predict_hybrid(cluster, group, [2, 3])
    assert one.samples_per_second == pytest.approx(100 / 1.5 + 50 / 3.5)
    assert both.samples_per_second == pytest.approx(100 / 1.5 + 2 * 50 / 4.5)


def test_fixed_time_is_paid_every_step():
    cluster = ClusterSpeeds((100.0, 50.0), (1e9, 1e9), 1, 100, (0.0, 0.5))
    hybrid = predict_hybrid(cluster, predict_sync(cluster, [0]), [1])
    assert hybrid.samples_per_second == pytest.approx(100.0 + 100 / 2.5)
    # four steps of 25 samples, for batches of at most 30
    cut = dataclasses.replace(cluster, exchange=ExchangeSettings(async_batch_size=30))
    hybrid = predict_hybrid(cut, predict_sync(cut, [0]), [1])
    assert hybrid.samples_per_second == pytest.approx(100.0 + 25 / 1.0)


def test_planned_periods_give_equal_rates():
    group, worker = Pusher(100, 1.0, 0.0, 0.01, 1), Pusher(100, 4.0, 0.5, 0.01, 1)
    assert periods_of(ExchangeSettings(period=None), [group, worker]) == (4, 1)
    assert periods_of(ExchangeSettings(period=None, num_batches=16), [group, worker]) == (2, 1)
    # 2 s of work of its own are to be a tenth of a period
    busy = worker._replace(busy_seconds=2.0)
    assert periods_of(ExchangeSettings(period=None), [group, busy]) == (20, 5)
    assert periods_of(ExchangeSettings(period=3), [group, busy]) == (3, 3)


def test_settings_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="period must be a number of at least 1"):
        ExchangeSettings(period=0)
    with pytest.raises(ValueError, match="`busy_seconds` must be finite"):
        ExchangeSettings(busy_seconds=-1.0)


@given(noise=st.floats(0, 1e6), batch=st.integers(1, 1000), flight=st.floats(0, 1e6))
def test_efficiency_falls_with_samples_in_flight(noise, batch, flight):
    cluster = ClusterSpeeds((1.0,), (1.0,), 1, batch, noise_scale=noise)
    now = statistical_efficiency(cluster, flight)
    assert 0 < statistical_efficiency(cluster, flight * 2 + 1) <= now <= 1
    assert statistical_efficiency(cluster, batch) == 1.0
    # between one over the batches in flight and no discount
    assert now >= min(1.0, batch / max(flight, 1e-9)) * (1 - 1e-12)


def test_efficiency_without_a_measured_noise_scale():
    cluster = ClusterSpeeds((1.0,), (1.0,), 1, 10)
    assert statistical_efficiency(cluster, 50.0) == pytest.approx(170 / 210)


def test_speeds_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="2 speeds, 1 link rates and 2 fixed times"):
        ClusterSpeeds((1.0, 1.0), (1.0,), 1, 1)
    with pytest.raises(ValueError, match="0 speeds"):
        ClusterSpeeds((), (), 1, 1)
    with pytest.raises(ValueError, match="must be above 0"):
        ClusterSpeeds((1.0,), (0.0,), 1, 1)
    with pytest.raises(ValueError, match="global batch at least 1"):
        ClusterSpeeds((1.0,), (1.0,), 1, 0)
    with pytest.raises(ValueError, match="`samples_per_second` must be finite"):
        ClusterSpeeds((math.nan,), (1.0,), 1, 1)
    with pytest.raises(ValueError, match="`noise_scale` must be finite"):
        ClusterSpeeds((1.0,), (1.0,), 1, 1, (), -1.0)
