"""New shares must pay what their compilation costs; those that were used before cost nothing."""

import itertools

import numpy as np
import pytest
from plants import by_speeds, simulate

from keras_het.planning.balance import make_policy
from keras_het.planning.balance.plan_trial import STEPS_TO_PAY, UsedShares


def chosen(optimum, cost, used=(), allowed=lambda _: True):
    """What is chosen where a step takes as many seconds as the larger share has samples."""
    shares = UsedShares()
    shares.new_share_seconds = cost
    for each in used:
        shares.observe(np.array(each))
    return tuple(shares.choose(np.array(optimum), lambda b: float(b.max()), allowed).tolist())


@pytest.mark.parametrize(("cost", "expected"), [(0, (50, 50)), (299, (50, 50)), (301, (53, 47))])
def test_a_new_share_must_pay_within_a_hundred_steps(cost, expected):
    assert STEPS_TO_PAY == 100
    assert chosen((50, 50), cost, [(60, 40), (53, 47)]) == expected


def test_what_has_lasted_will_last():
    shares = UsedShares()
    shares.new_share_seconds = 500.0
    optimum, used = np.array([50, 50]), np.array([53, 47])

    def choose():
        return shares.choose(optimum, lambda b: float(b.max()), lambda _: True).tolist()

    for _ in range(166):
        shares.observe(used)
    assert choose() == [53, 47]
    shares.observe(used)  # 167 steps gain 3 s each
    assert choose() == [50, 50]
    shares.speed_changed()
    assert choose() == [53, 47]


def test_what_pays_late_is_done_in_the_end():
    """Of a gain of 80 ms a step, 250 steps pay for 20 s."""
    policy = make_policy("min_max", 2, 240)
    policy.observe_new_share_seconds(20.0)
    run = simulate(policy, by_speeds("", (2, 1)), 300)
    assert [250 <= plan.step < 280 for plan in run.changes()] == [True]
    assert policy.shares == (160, 80)


def test_shares_that_each_replica_has_had_cost_nothing():
    assert chosen((53, 40), 1e9, [(60, 40), (53, 47)]) == (53, 40)


def test_only_allowed_shares_are_used_again():
    assert chosen((50, 50), 1e9, [(60, 40), (53, 47)], lambda b: b[0] != 53) == (60, 40)


def test_shares_of_long_ago_are_forgotten_together():
    used = [(1000 - each, each) for each in range(64, 0, -1)]
    assert chosen((500, 500), 1e9, [(500, 501), *used]) == (936, 64)
    assert chosen((500, 500), 1e9, [*used, (500, 501)]) == (500, 501)


def changing(period=80):
    """The first of three replicas is slower in every other period, by 20 to 40 %."""
    slower = itertools.accumulate(itertools.repeat(0.07), lambda a, b: 1.2 + (a - 1.2 + b) % 0.2)
    slower = [next(slower) for _ in range(100)]
    return by_speeds(
        "changing",
        (4, 2, 1),
        noise=0.05,
        spike_probability=0.02,
        factor=lambda t: (slower[t // period] if t // period % 2 else 1.0, 1.0, 1.0),
    )


def run(cost, granularity=1, seed=0):
    policy = make_policy("min_max", 3, 256, granularity=granularity)
    policy.observe_new_share_seconds(cost)
    return simulate(policy, changing(), 1200, seed=seed)


def num_shares(run):
    """Sizes that are compiled: different shares of the same replica."""
    return len({pair for shares in run.shares for pair in enumerate(shares)})


@pytest.mark.quick("0")
@pytest.mark.parametrize("seed", range(8))
def test_a_noisy_training_has_fewer_shares(seed):
    free, costly, coarse = run(0, seed=seed), run(1, seed=seed), run(1, "auto", seed=seed)
    assert num_shares(costly) < num_shares(free) / 1.5
    assert num_shares(coarse) < num_shares(free) / 1.5
    for each in (costly, coarse):
        assert each.ratio_to_limit() >= free.ratio_to_limit() - 0.03


def test_without_a_known_cost_plans_do_not_change():
    policy, told = (make_policy("min_max", 3, 256) for _ in range(2))
    told.observe_new_share_seconds(0.0)
    assert simulate(policy, changing(), 500).plans == simulate(told, changing(), 500).plans
