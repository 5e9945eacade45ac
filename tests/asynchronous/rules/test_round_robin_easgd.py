"""Original EASGD: in turns, which the center enforces."""

import numpy as np
import pytest
from rule_checks import SIZE, Center, ElasticEquations, follow, start_vector

from keras_het.asynchronous.rules import RoundRobinEASGD, Signal


def test_equations():
    start = start_vector()
    follow(RoundRobinEASGD(3, 0.3), ElasticEquations(start, 0.3), start, order=[0, 1, 2])


@pytest.fixture
def center():
    return Center(RoundRobinEASGD(3, 0.3), start_vector())


def are_taken(center, *workers):
    return [center.push(i, 1, center.version, np.ones(SIZE)) is not None for i in workers]


def test_a_push_out_of_turn_changes_nothing(center):
    assert are_taken(center, 1, 2) == [False, False]
    np.testing.assert_array_equal(center.values, start_vector())
    assert are_taken(center, 0, 0) == [True, False]
    assert all(are_taken(center, 1, 2, 0, 1))
    assert center.version == 5


def test_a_worker_that_was_given_up_gets_its_turns_again(center):
    assert center.signal(1, Signal.LEAVE) == 0
    assert are_taken(center, 0, 2, 0) == [True] * 3  # it is passed over
    assert are_taken(center, 1, 2) == [False, True]  # it is back: its turn comes
    assert are_taken(center, 0, 2, 1, 2) == [True, False, True, True]


def test_a_worker_that_leaves_in_its_turn_passes_it_on(center):
    center.signal(0, Signal.LEAVE)
    assert all(are_taken(center, 1, 2, 1))


def test_the_turn_is_not_left_with_one_that_is_gone_when_another_returns(center):
    for worker in range(3):
        center.signal(worker, Signal.LEAVE)
    assert are_taken(center, 1, 1) == [True, True]
    assert are_taken(center, 2, 1, 2) == [False, True, True]


def test_a_refused_push_passes_the_turn_on(center):
    center.refuse(0)
    assert are_taken(center, 0, 1, 2, 0, 1) == [False, True, True, True, True]
