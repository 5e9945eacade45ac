"""Shares in multiples of a granularity: the best ones, who takes the rest, and when they pay."""

import itertools

import numpy as np
import pytest
from plants import STATIC, by_speeds, simulate
from test_min_max import random_bounds, random_table, step_seconds

from keras_het.planning.balance import POLICIES, make_policy
from keras_het.planning.balance.min_max import min_max_multiples, min_max_shares_linear


def are_multiples(shares, size):
    """All shares but one, which has the rest of the batch."""
    return sorted(share % size for share in shares) == [0] * (len(shares) - 1) + [
        sum(shares) % size
    ]


def brute_force(table, total, size, lower, upper):
    """Smallest step time over all shares that are multiples, but for one; None without any."""
    ranges = [range(low, high + 1) for low, high in zip(lower[:-1], upper[:-1], strict=True)]
    best = None
    for head in itertools.product(*ranges):
        shares = (*head, total - sum(head))
        if lower[-1] <= shares[-1] <= upper[-1] and are_multiples(shares, size):
            seconds = step_seconds(table, shares)
            best = seconds if best is None else min(best, seconds)
    return best


def test_multiples_are_optimal():
    random = np.random.default_rng(23)
    none = rests = zeros = bound = 0
    for _ in range(1000):
        n, total = int(random.integers(1, 5)), int(random.integers(1, 15))
        size = int(random.integers(2, 5))
        table = random_table(random, n, total + size)
        lower, upper = random_bounds(random, n, total)
        upper = np.minimum(upper, total)

        def times(shares, table=table):
            return table[np.arange(len(table)), np.minimum(shares, table.shape[1] - 1)]

        shares = min_max_multiples(times, total, size, lower, upper)
        expected = brute_force(table, total, size, lower, upper)
        if shares is None:
            assert expected is None
            none += 1
            continue
        assert shares.sum() == total and are_multiples(shares.tolist(), size)
        assert (lower <= shares).all() and (shares <= upper).all()
        assert step_seconds(table, shares) == expected
        rests += total % size > 0
        zeros += (shares == 0).any()
        bound += (shares == upper).any()
    assert none > 20 and min(rests, zeros, bound) > 100


@pytest.mark.parametrize(
    ("fixed", "slope", "total", "upper", "expected"),
    [
        ([0, 0, 0], [1, 2, 4], 112, None, [64, 32, 16]),
        ([0, 0, 0], [1, 2, 4], 115, None, [67, 32, 16]),  # the fastest takes the rest
        ([0, 0], [1, 2], 115, [64, 115], [64, 51]),  # unless it may not
        ([0, 0], [1, 1], 20, [12, 12], [12, 8]),  # a bound that is no multiple
        ([0, 1000], [1, 1], 100, None, [100, 0]),
        ([0, 0], [1, 1], 4, None, [4, 0]),
        ([0, 0], [1, 1], 16, [4, 16], [0, 16]),
        ([0, 0], [1, 1], 18, [9, 9], None),
    ],
)
def test_known_answers(fixed, slope, total, upper, expected):
    fixed, slope = np.array(fixed, float), np.array(slope, float)
    upper = np.full(len(fixed), total) if upper is None else np.array(upper)
    shares = min_max_multiples(
        lambda b: fixed + slope * b, total, 8, np.zeros(len(fixed), np.int64), upper
    )
    assert (None if shares is None else shares.tolist()) == expected


def test_a_thousand_replicas():
    random = np.random.default_rng(24)
    fixed, slope = random.random(1000) * 0.02, 10.0 ** random.uniform(-4, -2, 1000)
    total, none = 200_003, np.zeros(1000, np.int64)
    shares = min_max_multiples(lambda b: fixed + slope * b, total, 8, none, np.full(1000, total))
    finest = min_max_shares_linear(fixed, slope, total)
    assert shares.sum() == total and are_multiples(shares.tolist(), 8)
    longest = [np.where(b > 0, fixed + slope * b, 0.0).max() for b in (finest, shares)]
    assert longest[0] <= longest[1] <= longest[0] + 8 * slope.max()


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("plant", STATIC, ids=lambda plant: plant.name)
def test_all_plans_have_multiples(name, plant):
    policy = make_policy(
        name, plant.num_replicas, plant.batch, upper=plant.upper, granularity=8, lower=1
    )
    for plan in simulate(policy, plant, 60, seed=1, hide=0.1).plans:
        assert are_multiples(plan.shares, 8)
        assert all(0 < share <= plant.batch for share in plan.shares)


@pytest.mark.parametrize("plant", STATIC, ids=lambda plant: plant.name)
def test_auto_costs_no_balance(plant):
    """The rounding costs 2 % at most, and the dead-band allows another 2.5 %."""
    policy = make_policy("min_max", plant.num_replicas, plant.batch, upper=plant.upper)
    coarse = make_policy(
        "min_max", plant.num_replicas, plant.batch, upper=plant.upper, granularity="auto"
    )
    steps = [simulate(each, plant, 100).ratio_to_limit(20) for each in (policy, coarse)]
    assert steps[1] >= steps[0] / 1.045


@pytest.mark.parametrize(
    ("batch", "replicas", "shares"),
    [(512, 2, 8), (96, 8, 4), (100, 2, 2), (98, 14, 1), (384, 3, 8), (3, 4, 1), (400, 3, 8)],
)
def test_auto_takes_the_coarsest_that_loses_little(batch, replicas, shares):
    """Even shares of 12 are no multiples of 8, and 52 of 100 samples lose 4 %."""
    even = make_policy("even", replicas, batch, granularity="auto").shares
    assert are_multiples(even, shares)
    assert shares == 8 or not are_multiples(even, 2 * shares)


def test_bounds_that_allow_no_multiples_make_the_granularity_finer():
    assert make_policy("even", 2, 40, granularity=8).shares in ((24, 16), (16, 24))
    policy = make_policy("even", 2, 40, granularity=8, upper=[20, 20])
    assert policy.shares == (20, 20)
    assert make_policy("even", 3, 8, granularity=8).shares == (4, 2, 2)
    policy = make_policy("even", 2, 48, granularity=8)
    policy.propose(-1)
    policy.set_upper(0, 21)
    assert policy.propose(0).shares == (16, 32)


def test_an_unused_replica_is_tried_again_with_a_multiple():
    plant = by_speeds("", (1, 1, 1), fixed=0.001, factor=lambda t: (1, 1, 400 if t < 200 else 1))
    run = simulate(make_policy("min_max", 3, 256, granularity=8), plant, 1500)
    assert any(plan.unused for plan in run.plans) and not run.plans[-1].unused
    assert all(are_multiples(plan.shares, 8) for plan in run.plans)
