"""The time of a step as a straight line over the samples of a replica."""

import math
from typing import Any

import numpy as np
import pytest

from keras_het.planning.time_model import LinearTimeModel


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
