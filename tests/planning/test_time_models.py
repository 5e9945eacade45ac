"""Time models beyond the straight line."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_het.planning.times.overlapped_time_model import OverlappedTimeModel
from keras_het.planning.times.time_model import LinearTimeModel, TimeModel

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
