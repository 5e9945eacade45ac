"""Changes of speed, told from noise and outliers as early as is certain enough."""

import numpy as np
import pytest

from keras_het.planning.time_model_fit import SpeedChanges


def steps_found(ratios, noise=0.01, repeated=True, changes=None):
    """Feeds ratios of one replica; returns what was found in each step.

    After a change the model is that of the new speed, as `TimeModelFit` scales it.
    """
    changes, found, speed = changes or SpeedChanges(2), [], 1.0
    for ratio in ratios:
        both = np.array([ratio / speed, 1.0])
        steps = changes.observe(both, np.array([True, True]), np.array([repeated, True]), noise)
        assert steps[1] == 0
        found.append(int(steps[0]))
        speed = ratio if steps[0] else speed
    return found


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ([1, 3, 3, 3], [0, 0, 2, 0]),  # two alike
        ([1, 3.3, 2.9], [0, 0, 2]),
        ([1, 3, 1, 3, 1], [0, 0, 0, 0, 0]),  # single ones are outliers
        ([1, 3, 1.7, 1], [0, 0, 0, 0]),  # two that are not alike
        ([1, 30, 30], [0, 0, 2]),
        ([1, 0.5], [0, 1]),  # faster: outliers are slow
        ([1, 0.01, 1], [0, 0, 0]),  # no device becomes so fast
        ([1, 1.1, 1.1, 1.1, 1.1, 1.1], [0, 0, 0, 0, 4, 0]),
    ],
)
def test_when_a_change_is_found(ratios, expected):
    assert steps_found(ratios) == expected


def test_what_exceeds_the_noise_only_a_little_takes_more_steps():
    assert steps_found([1, 3, 3], noise=0.3)[-1] == 0
    assert sum(steps_found([3] * 8, noise=0.3)) > 0


def test_another_share_can_deviate_from_a_line():
    assert steps_found([1, 0.5], repeated=False) == [0, 0]
    assert steps_found([1, 3, 3], repeated=False) == [0, 0, 0]


def test_a_replica_that_comes_and_goes_is_believed_at_once_until_it_was_an_outlier():
    changes = SpeedChanges(2)
    assert steps_found([1, 3, 3, 1], changes=changes) == [0, 0, 2, 1]
    assert steps_found([1, 3, 3, 1], changes=changes) == [0, 1, 0, 1]
    assert steps_found([1, 3, 1], changes=changes) == [0, 1, 1]
    assert steps_found([1, 3, 1], changes=changes) == [0, 0, 0]


def test_where_outliers_are_frequent_three_steps_must_be_alike():
    changes = SpeedChanges(2)
    assert not any(steps_found([1, 3, 1, 5, 1, 2, 1], changes=changes))
    assert steps_found([1, 3, 3, 3], changes=changes) == [0, 0, 0, 3]


def test_what_was_forgotten_does_not_count():
    changes = SpeedChanges(2)
    steps_found([1, 3], changes=changes)
    changes.forget(0)
    assert steps_found([3, 1], changes=changes) == [0, 0]
