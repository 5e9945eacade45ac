"""Time models beyond the straight line."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_het.planning.overlapped_time_model import OverlappedTimeModel
from keras_het.planning.piecewise_time_model import PiecewiseLinearTimeModel
from keras_het.planning.time_model import LinearTimeModel, TimeModel

SECONDS = st.floats(0, 100)


def overlapped(gamma=0.25, overlapping=4.0, last=1.0):
    return OverlappedTimeModel(
        LinearTimeModel(1.0, 0.5), LinearTimeModel(0.0, 1.0), gamma, overlapping, last
    )


def test_overlap_has_a_communication_bound_and_a_compute_bound_end():
    model = overlapped()
    # a = 2, P = 2: 2 + 2 + 1 = 5 against 2 + 0.5 + 4 + 1 = 7.5
    assert model.seconds(2) == 7.5
    assert not model.hides_communication(2)
    # a = 11, P = 20: 11 + 20 + 1 = 32 against 11 + 5 + 4 + 1 = 21
    assert model.seconds(20) == 32
    assert model.hides_communication(20)
    assert isinstance(model, TimeModel)


@given(a=SECONDS, q=SECONDS, m=SECONDS, k=SECONDS, gamma=st.floats(0, 1), sent=SECONDS)
def test_overlap_never_takes_less_time_for_more_samples(a, q, m, k, gamma, sent):
    model = OverlappedTimeModel(LinearTimeModel(a, q), LinearTimeModel(m, k), gamma, sent)
    times = [model.seconds(samples) for samples in range(20)]
    assert times == sorted(times)


def test_overlap_refuses_bad_numbers():
    with pytest.raises(ValueError, match="from 0 to 1"):
        overlapped(gamma=1.5)
    with pytest.raises(ValueError, match="`overlapped_seconds` must be finite"):
        overlapped(overlapping=math.nan)


def test_pieces_go_through_their_points_and_on():
    model = PiecewiseLinearTimeModel((10, 20, 40), (5, 6, 16))
    assert [model.seconds(samples) for samples in (10, 15, 20, 30, 40)] == [5, 5.5, 6, 11, 16]
    assert model.seconds(0) == 4  # first piece
    assert model.seconds(60) == 26  # steepest piece
    assert PiecewiseLinearTimeModel((10,), (5,)).seconds(4) == 2
    assert PiecewiseLinearTimeModel((10, 11), (5, 50)).seconds(1) == 0  # never negative


@given(
    points=st.lists(st.tuples(st.integers(1, 50), SECONDS), min_size=1, max_size=20),
)
def test_fitted_pieces_never_fall(points):
    samples, seconds = zip(*points, strict=True)
    model = PiecewiseLinearTimeModel.from_measurements(samples, seconds)
    times = [model.seconds(share / 4) for share in range(240)]
    assert all(left <= right + 1e-9 for left, right in itertools.pairwise(times))
    assert model.samples == tuple(sorted(set(samples)))


def test_falling_measurements_are_pooled():
    model = PiecewiseLinearTimeModel.from_measurements([1, 2, 3, 3], [1.0, 5.0, 2.0, 2.0])
    assert model.measured_seconds == (1.0, 3.0, 3.0)


def test_pieces_refuse_bad_points():
    with pytest.raises(ValueError, match="ascending positive samples"):
        PiecewiseLinearTimeModel((2, 1), (1, 2))
    with pytest.raises(ValueError, match="ascending positive samples"):
        PiecewiseLinearTimeModel((1, 2), (2, 1))
    with pytest.raises(ValueError, match="as many seconds as samples"):
        PiecewiseLinearTimeModel.from_measurements([1], [])
