import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_het.planning.times.time_model import LinearTimeModel

_seconds = st.floats(0, 1e6)


def test_known_values() -> None:
    model = LinearTimeModel(fixed_seconds=0.5, seconds_per_sample=0.25)
    assert model.seconds(0) == 0.5
    assert model.seconds(6) == 2.0
    assert model.seconds(np.int64(6)) == 2.0


@given(_seconds, _seconds, st.integers(0, 10_000), st.integers(0, 10_000))
def test_is_a_line(fixed: float, slope: float, first: int, second: int) -> None:
    model = LinearTimeModel(fixed, slope)
    assert model.seconds(0) == fixed
    assert math.isclose(
        model.seconds(first) + model.seconds(second), model.seconds(first + second) + fixed
    )


def test_is_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        LinearTimeModel(0.0, 1.0).fixed_seconds = 1.0


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
