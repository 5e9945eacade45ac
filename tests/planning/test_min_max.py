"""The min-max program: exact, deterministic, and honest about what cannot be solved."""

import itertools

import numpy as np
import pytest
from depth import examples
from hypothesis import given
from hypothesis import strategies as st

from keras_het.planning.balance.min_max import (
    min_max_shares,
    min_max_shares_linear,
)
from keras_het.planning.shares import check_bounds, proportional_shares


def step_seconds(table, shares):
    """Time of a step from a table of times [replica][share]; a share of 0 takes no time."""
    return max(row[share] if share else 0.0 for row, share in zip(table, shares, strict=True))


def brute_force(table, total, lower, upper):
    """Smallest step time over all shares."""
    ranges = [range(low, high + 1) for low, high in zip(lower[:-1], upper[:-1], strict=True)]
    best = np.inf
    for head in itertools.product(*ranges):
        last = total - sum(head)
        if lower[-1] <= last <= upper[-1]:
            best = min(best, step_seconds(table, (*head, last)))
    return best


def random_bounds(random, n, total):
    while True:
        lower = random.integers(0, 3, n) * (random.random(n) < 0.3)
        upper = np.where(random.random(n) < 0.4, random.integers(0, total + 1, n), total)
        upper = np.maximum(upper, lower)
        if lower.sum() <= total <= upper.sum() and (lower <= total).all():
            return lower, upper


def random_table(random, n, total):
    """Nondecreasing times with plateaus, intercepts, jumps and exact zeros."""
    kind = random.integers(4)
    if kind == 0:  # steps of whole numbers: many ties and plateaus
        rises = random.integers(0, 3, (n, total + 1)) * (random.random((n, total + 1)) < 0.5)
        return np.cumsum(rises, axis=1).astype(float)
    if kind == 1:  # lines with whole numbers: ties between replicas
        slope, fixed = random.integers(0, 4, (n, 1)), random.integers(0, 8, (n, 1))
        return (fixed + slope * np.arange(total + 1)).astype(float)
    if kind == 2:  # lines, some with a fixed cost beyond everything else
        slope = random.random((n, 1)) * 10.0 ** random.integers(-3, 3, (n, 1))
        return 10 * random.random((n, 1)) ** 4 + slope * np.arange(total + 1)
    return np.cumsum(random.random((n, total + 1)) ** 4, axis=1)


def test_optimum_equals_brute_force_on_a_thousand_instances():
    random = np.random.default_rng(20)
    zeros = plateaus = 0
    for _ in range(1000):
        n, total = int(random.integers(1, 5)), int(random.integers(1, 11))
        table = random_table(random, n, total)
        lower, upper = random_bounds(random, n, total)
        rows = np.arange(n)
        shares = min_max_shares(lambda b, t=table, r=rows: t[r, b], total, lower, upper)
        assert shares.sum() == total
        assert (lower <= shares).all() and (shares <= upper).all()
        assert step_seconds(table, shares) == brute_force(table, total, lower, upper)
        zeros += (shares == 0).any()
        plateaus += (np.diff(table, axis=1) == 0).any()
    assert zeros > 100 and plateaus > 100


LINES = st.lists(
    st.tuples(
        st.one_of(st.just(0.0), st.floats(1e-6, 10)), st.one_of(st.just(0.0), st.floats(1e-9, 1))
    ),
    min_size=1,
    max_size=12,
)


@examples(200)
@given(lines=LINES, total=st.integers(0, 10_000))
def test_no_exchange_of_one_sample_is_better(lines, total):
    fixed, slope = map(np.array, zip(*lines, strict=True))
    shares = min_max_shares_linear(fixed, slope, total)

    def seconds(b):
        return float(np.where(b > 0, fixed + slope * b, 0.0).max())

    assert shares.sum() == total and (shares >= 0).all()
    # all done before the slowest, plus one more sample each, is either as slow or too few samples
    best = seconds(shares)
    with np.errstate(divide="ignore", invalid="ignore"):
        within = np.where(slope > 0, np.floor((best * (1 - 1e-9) - fixed) / slope), total)
    within = np.where(fixed + slope > best * (1 - 1e-9), 0, np.clip(within, 0, total))
    assert total == 0 or best == 0 or within.sum() < total


@pytest.mark.parametrize(
    ("fixed", "slope", "total", "upper", "expected"),
    [
        ([0, 0, 0], [1, 2, 4], 70, None, [40, 20, 10]),
        ([0, 0], [1, 1], 7, None, [4, 3]),
        ([5, 5], [0, 0], 10, None, [5, 5]),  # any split is optimal: the even one
        ([0, 1000], [1, 1], 100, None, [100, 0]),  # not worth using
        ([0, 0], [1, 1], 10, [2, 10], [2, 8]),  # memory
        ([0, 0], [0, 1], 10, None, [10, 0]),
        ([1.0, 1.0], [1e-17, 1e-17], 10, None, [5, 5]),  # flat in float64
    ],
)
def test_known_answers(fixed, slope, total, upper, expected):
    shares = min_max_shares_linear(fixed, slope, total, upper=upper)
    assert shares.tolist() == expected
    assert shares.dtype == np.int64


def test_a_lower_bound_uses_a_hopeless_replica_but_still_balances_the_others():
    shares = min_max_shares_linear([0, 0, 1000], [1, 1, 1], 101, lower=[0, 0, 1])
    assert shares.tolist() == [50, 50, 1]


def test_ten_thousand_replicas():
    random = np.random.default_rng(22)
    fixed, slope = random.random(10_000) * 0.02, 10.0 ** random.uniform(-4, -1, 10_000)
    total = 1_000_000
    shares = min_max_shares_linear(fixed, slope, total)
    assert shares.sum() == total
    longest = np.where(shares > 0, fixed + slope * shares, 0.0).max()
    within = np.floor((longest * (1 - 1e-12) - fixed) / slope).clip(0, total)
    assert within.sum() < total


@pytest.mark.parametrize(
    ("lower", "upper", "match"),
    [
        ([0, 0], [4, 5], "upper bounds to 9"),
        ([6, 6], None, "lower bounds sum to 12"),
        ([-1, 0], None, "0 <= lower <= upper"),
        ([3, 0], [2, 10], "Received: lower 3 and upper 2 for replica 0"),
        ([0, 0, 0], None, "one number for each of 2 replicas"),
    ],
)
def test_bounds_without_a_solution_are_refused(lower, upper, match):
    with pytest.raises(ValueError, match=match):
        min_max_shares_linear([0, 0], [1, 1], 10, lower, upper)


def test_bad_numbers_are_refused():
    with pytest.raises(TypeError, match="whole number of samples"):
        min_max_shares_linear([0], [1], 1.5)
    with pytest.raises(TypeError, match="lower must hold whole numbers"):
        min_max_shares_linear([0], [1], 2, lower=[0.5])
    with pytest.raises(ValueError, match="total must be from 0"):
        min_max_shares_linear([0], [1], -1)
    with pytest.raises(ValueError, match="finite and at least 0"):
        min_max_shares_linear([0], [np.nan], 1)
    with pytest.raises(ValueError, match="at least one replica"):
        check_bounds(3, 0)
    with pytest.raises(ValueError, match="times must return 2 finite seconds"):
        min_max_shares(lambda b: np.full(2, np.nan), 10, [0, 0])
    with pytest.raises(ValueError, match="times must return 2 finite seconds"):
        min_max_shares(lambda b: np.ones(3), 10, [0, 0])


@examples(200)
@given(
    replicas=st.lists(
        st.tuples(st.one_of(st.just(0.0), st.floats(1e-6, 1e6)), st.integers(0, 5)),
        min_size=1,
        max_size=8,
    ),
    total=st.integers(0, 1000),
    caps=st.booleans(),
)
def test_proportional_shares_sum_and_stay_in_bounds(replicas, total, caps):
    weights = [weight for weight, _ in replicas]
    lower = [low for _, low in replicas]
    upper = [low + 300 if caps else 1000 for low in lower]
    if not any(weights) or sum(lower) > total or sum(min(h, total) for h in upper) < total:
        return
    if any(low > total for low in lower):
        return
    shares = proportional_shares(total, weights, lower, upper)
    assert shares.sum() == total
    assert (shares >= lower).all() and (shares <= upper).all()


def test_proportional_shares_known_answers():
    assert proportional_shares(70, [4, 2, 1]).tolist() == [40, 20, 10]
    assert proportional_shares(10, [1, 1, 1]).tolist() == [4, 3, 3]
    assert proportional_shares(70, [4, 2, 1], upper=[20, 70, 70]).tolist() == [20, 33, 17]
    assert proportional_shares(10, [1, 0, 0], upper=[2, 10, 10]).tolist() == [2, 4, 4]
    assert proportional_shares(10, [1, 0], lower=[0, 1]).tolist() == [9, 1]
    with pytest.raises(ValueError, match="At least one weight must be positive"):
        proportional_shares(3, [0, 0])
