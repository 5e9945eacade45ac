"""Time models: a straight line, and one with gradients sent during the backward pass."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_het.planning.times.time_model import LinearTimeModel, OverlappedTimeModel, TimeModel

_seconds = st.floats(0, 1e6)


def test_known_values() -> None:
    model = LinearTimeModel(fixed_seconds=0.5, seconds_per_sample=0.25)
    assert model.seconds(0) == 0.5
    assert model.seconds(6) == 2.0
    assert model.seconds(np.int64(6)) == 2.0


@pytest.mark.parametrize("value", [-1e-9, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["fixed_seconds", "seconds_per_sample"])
def test_refuses_bad_numbers(name: str, value: float) -> None:
    arguments = {"fixed_seconds": 0.0, "seconds_per_sample": 1.0, name: value}
    with pytest.raises(ValueError, match=rf"`{name}` must be finite and at least 0. Received"):
        LinearTimeModel(**arguments)
    with pytest.raises(ValueError, match="`samples` must be finite and at least 0"):
        LinearTimeModel(0.0, 1.0).seconds(value)


@pytest.mark.parametrize("value", ["1", None, True, b"1"])
def test_refuses_other_types(value: Any) -> None:
    with pytest.raises(TypeError, match=r"`fixed_seconds` must be a real number\. Received"):
        LinearTimeModel(value, 1.0)
    with pytest.raises(TypeError, match="`samples` must be a real number"):
        LinearTimeModel(0.0, 1.0).seconds(value)


def overlapped(
    gamma: float = 0.25, overlapping: float = 4.0, last: float = 1.0
) -> OverlappedTimeModel:
    return OverlappedTimeModel(
        LinearTimeModel(1.0, 0.5), LinearTimeModel(0.0, 1.0), gamma, overlapping, last
    )


def test_overlap_has_a_communication_bound_and_a_compute_bound_end() -> None:
    model = overlapped()
    # a = 2, P = 2: 2 + 2 + 1 = 5 against 2 + 0.5 + 4 + 1 = 7.5
    assert model.seconds(2) == 7.5
    # a = 11, P = 20: 11 + 20 + 1 = 32 against 11 + 5 + 4 + 1 = 21
    assert model.seconds(20) == 32
    assert isinstance(model, TimeModel)


@given(*[st.floats(0, 100)] * 4, st.floats(0, 1), st.floats(0, 100))
def test_overlap_never_takes_less_time_for_more_samples(
    a: float, q: float, m: float, k: float, gamma: float, sent: float
) -> None:
    model = OverlappedTimeModel(LinearTimeModel(a, q), LinearTimeModel(m, k), gamma, sent)
    times = [model.seconds(samples) for samples in range(20)]
    assert times == sorted(times)


def test_overlap_refuses_bad_numbers() -> None:
    with pytest.raises(ValueError, match="from 0 to 1"):
        overlapped(gamma=1.5)
    with pytest.raises(ValueError, match="`overlapped_seconds` must be finite"):
        overlapped(overlapping=math.nan)
