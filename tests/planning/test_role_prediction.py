"""Predicted samples per second of given roles, by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_het.planning.role_prediction import (
    ClusterSpeeds,
    predict_hybrid,
    predict_sync,
    statistical_efficiency,
)


def test_a_sync_group_by_hand():
    cluster = ClusterSpeeds((100.0, 50.0), (1000.0, 100.0), 500, 100)
    both = predict_sync(cluster, [1, 0])
    assert both.mode == "balanced" and both.roles == ("sync", "sync")
    assert both.shares == (67, 33)
    assert both.step_seconds == pytest.approx(0.67 + 500 / 100)  # computation, ring of 2
    assert both.samples_per_second == both.effective_samples_per_second
    assert both.samples_per_second == pytest.approx(100 / 5.67)
    one = predict_sync(cluster, [0])
    assert one.mode == "leave_out" and one.roles == ("sync", "out")
    assert one.step_seconds == pytest.approx(1.0)
    three = ClusterSpeeds((100.0,) * 3, (1000.0, 400.0, 800.0), 600, 30, (0.5, 0.5, 0.5))
    # 0.5 + 10 / 100 and 2 * 2 / 3 * 600 / 400
    assert predict_sync(three, range(3)).step_seconds == pytest.approx(0.6 + 2.0)


def test_an_async_worker_behind_a_slow_link_by_hand():
    cluster = ClusterSpeeds((100.0, 50.0), (1000.0, 100.0), 500, 100, noise_scale=900.0)
    hybrid = predict_hybrid(cluster, predict_sync(cluster, [0]), [1])
    assert hybrid.mode == "hybrid" and hybrid.roles == ("sync", "async")
    # steps of 50 samples take 1 s like the group's, five of them hide the exchange of 5 s
    assert hybrid.pushed_samples == (0, 250)
    assert hybrid.samples_per_second == pytest.approx(150.0)
    # 150 samples/s: 150 in flight during a step of the group, 1500 in the 10 s of a push
    expected = 100 * 1000 / 1050 + 50 * 1000 / 2400
    assert hybrid.effective_samples_per_second == pytest.approx(expected)
    assert hybrid.step_seconds == pytest.approx(1.0)  # nobody waits


def test_async_workers_share_what_the_all_reduce_leaves():
    cluster = ClusterSpeeds((100.0, 100.0, 20.0, 20.0), (1000.0,) * 4, 500, 100)
    group = predict_sync(cluster, [0, 1])
    assert group.step_seconds == pytest.approx(1.0)  # half of it at full rate
    # of 1000 bytes/s 500 are left: 1 s for one worker, 2 s for each of two
    assert predict_hybrid(cluster, group, [2]).pushed_samples == (0, 0, 20, 0)
    assert predict_hybrid(cluster, group, [2, 3]).pushed_samples == (0, 0, 40, 40)


def test_fixed_time_is_paid_every_step():
    cluster = ClusterSpeeds((100.0, 50.0), (1e9, 1e9), 1, 100, (0.0, 0.5))
    hybrid = predict_hybrid(cluster, predict_sync(cluster, [0]), [1])
    assert hybrid.pushed_samples == (0, 25)
    assert hybrid.samples_per_second == pytest.approx(125.0)
    # even one sample takes longer than a step of the group
    slow = ClusterSpeeds((100.0, 50.0), (1e9, 1e9), 1, 100, (0.0, 1.98))
    hybrid = predict_hybrid(slow, predict_sync(slow, [0]), [1])
    assert hybrid.pushed_samples == (0, 1)
    assert hybrid.samples_per_second == pytest.approx(100.5)


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
