"""Largest-remainder shares and the numbering of replicas."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_het.planning.balance import StaticPolicy
from keras_het.planning.replica_layout import ReplicaLayout, weights_of_replicas
from keras_het.planning.shares import apportion

WEIGHTS = st.lists(
    st.one_of(st.integers(0, 100), st.floats(0, 1e6, allow_nan=False)), min_size=1, max_size=9
).filter(any)


@given(total=st.integers(0, 5000), weights=WEIGHTS)
def test_shares_sum_to_the_total_and_stay_within_one_sample_of_the_quota(total, weights):
    shares = apportion(total, weights)
    assert sum(shares) == total
    weight_sum = sum(Fraction(weight) for weight in weights)
    for share, weight in zip(shares, weights, strict=True):
        quota = total * Fraction(weight) / weight_sum
        assert abs(share - quota) < 1
        assert share >= 0
        if weight == 0:
            assert share == 0


@given(shares=st.lists(st.integers(0, 1000), min_size=1, max_size=9).filter(any))
def test_whole_numbers_that_sum_to_the_total_come_back_unchanged(shares):
    assert apportion(sum(shares), shares) == tuple(shares)


@given(total=st.integers(0, 500), weights=WEIGHTS, scale=st.integers(1, 1000))
def test_scaling_the_weights_changes_nothing(total, weights, scale):
    exact = [Fraction(weight) for weight in weights]
    assert apportion(total, exact) == apportion(total, [scale * weight for weight in exact])


@pytest.mark.parametrize(
    ("total", "weights", "expected"),
    [
        (70, [4, 2, 1], (40, 20, 10)),
        (64, [4, 2, 1], (37, 18, 9)),
        (10, [1 / 3, 1 / 3, 1 / 3], (4, 3, 3)),
        (1, [1, 1, 1], (1, 0, 0)),
        (7, [0, 5], (0, 7)),
        (5, np.array([1, 1], np.float32), (3, 2)),
        (6, np.array([4, 2]), (4, 2)),
        (2**53 + 1, [1, 1], (2**52 + 1, 2**52)),
        (0, [1, 2], (0, 0)),
    ],
)
def test_known_answers(total, weights, expected):
    shares = apportion(total, weights)
    assert shares == expected
    assert all(type(share) is int for share in shares)


@pytest.mark.parametrize("weights", [[1, -1], [1, float("nan")], [1, float("inf")]])
def test_bad_weights_are_refused(weights):
    with pytest.raises(ValueError, match="finite number, zero or more"):
        apportion(3, weights)


@pytest.mark.parametrize("weights", [[], [0, 0.0]])
def test_all_zero_weights_are_refused(weights):
    with pytest.raises(ValueError, match="At least one weight must be positive"):
        apportion(3, weights)


def test_bad_totals_are_refused():
    for total in (-1, 1.5, float("nan"), "3"):
        with pytest.raises(ValueError, match=r"total must be a whole number of at least 0"):
            apportion(total, [1])


def test_replicas_are_numbered_worker_by_worker():
    layouts = [ReplicaLayout((2, 1, 3), index) for index in range(3)]
    assert [list(layout.local_replicas) for layout in layouts] == [[0, 1], [2], [3, 4, 5]]
    assert layouts[0].num_replicas == 6
    assert layouts[0].num_workers == 3


def test_bad_layouts_are_refused():
    with pytest.raises(ValueError, match="at least one worker"):
        ReplicaLayout((1, 0), 0)
    with pytest.raises(ValueError, match="worker_index"):
        ReplicaLayout((1, 1), 2)


LAYOUT = ReplicaLayout((2, 1), 0)


@pytest.mark.parametrize(
    "given",
    [(4, 0, 2.5), [4, 0, 2.5], np.array([4, 0, 2.5]), {2: 2.5, 0: 4, 1: 0}],
    ids=["tuple", "list", "array", "dict"],
)
def test_weights_are_given_in_order_or_by_replica(given):
    assert weights_of_replicas(given, LAYOUT) == (4, 0, 2.5)
    assert StaticPolicy(3, 13, weights=given).shares == (8, 0, 5)


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({0: 4, 1: 2}, ValueError, r"replica from 0 to 2. Received: .*\[2\] are missing"),
        ({0: 4, 1: 2, 3: 1}, ValueError, r"\[2, 3\] are missing or do not exist"),
        ({"a": 4}, ValueError, "are missing or do not exist"),
        ({4, 2, 1}, TypeError, "a list with one number for each replica.*of type set"),
        ("421", TypeError, "of type str"),
        (iter([4, 2, 1]), TypeError, "of type list_iterator"),
        (4, TypeError, "of type int"),
        (["4", "2", "1"], TypeError, "of type list"),
        ([4, 2], ValueError, "2 weights"),
    ],
)
def test_other_weights_are_refused(given, kind, message):
    with pytest.raises(kind, match=message):
        weights_of_replicas(given, LAYOUT)
    if message != "2 weights":
        with pytest.raises(kind, match=message.replace("shares", "weights")):
            StaticPolicy(3, 13, weights=given)
