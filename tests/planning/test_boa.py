"""How fast and how well the default policy balances."""

import dataclasses

import numpy as np
import pytest
from _peer_policies import PEERS
from plants import CURVED, STATIC, Plant, by_speeds, simulate, slow_down

from keras_het.planning.balance import EvenPolicy, make_policy
from keras_het.planning.balance.plan_trial import COST, FIRST_WAIT, STEPS_OF_A_TRY, RetrySchedule


def run_boa(plant, steps, seed=0, **options):
    policy = make_policy("min_max", plant.num_replicas, plant.batch, upper=plant.upper)
    return simulate(policy, plant, steps, seed=seed, **options)


@pytest.mark.parametrize("plant", STATIC, ids=lambda plant: plant.name)
def test_static_stragglers_are_gone_within_ten_steps(plant):
    run = run_boa(plant, 100)
    assert run.steps_to_balance() <= 10
    assert run.ratio_to_limit(10) >= 0.97
    assert not run.changes(10)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("plant", STATIC, ids=lambda plant: plant.name)
def test_balance_under_noise(plant, seed):
    noisy = dataclasses.replace(plant, noise=0.05, spike_probability=0.01)
    run = run_boa(noisy, 200, seed)
    assert run.ratio_to_limit(50) >= 0.95
    assert len(run.changes(50)) <= 3


@pytest.mark.parametrize(("milliseconds", "moves"), [(0.01, False), (1.0, True)])
def test_steps_too_short_for_a_difference_to_matter_keep_their_shares(milliseconds, moves):
    """Half of a 0.6 ms step is nothing that anybody sees."""
    policy = make_policy("min_max", 2, 70)
    policy.propose(-1)
    for step in range(100):
        shares = np.array(policy.shares)
        policy.observe(step, shares, shares * np.array([1.0, 2.0]) * milliseconds / 1000)
        policy.propose(step)
    assert (policy.shares != (35, 35)) == moves
    assert make_policy("min_max", 2, 70, least_gain_seconds=0.0).shares == (35, 35)


DYNAMIC = [
    by_speeds("1:1", (1, 1), factor=slow_down(0, 2, 60, 140)),
    by_speeds("4:2:1", (4, 2, 1), factor=slow_down(0, 3, 60, 140)),
    by_speeds("8:1", (8, 1), factor=slow_down(1, 2, 60, 140)),
    by_speeds("2:1 fixed", (2, 1), fixed=0.02, factor=slow_down(1, 2, 60, 140)),
    by_speeds("partial batches", (2, 1), steps_per_epoch=10, factor=slow_down(1, 2, 60, 140)),
]


@pytest.mark.parametrize("lookahead", [2, 4])
@pytest.mark.parametrize("plant", DYNAMIC, ids=lambda plant: plant.name)
def test_a_slow_down_and_a_recovery_are_balanced_within_twenty_steps(plant, lookahead):
    run = run_boa(plant, 220, lookahead=lookahead)
    # steps are counted without the partial batches
    start, end = (54, 126) if plant.steps_per_epoch else (60, 140)
    assert run.steps_to_balance(start, end) <= 20
    assert run.steps_to_balance(end) <= 20
    assert run.ratio_to_limit(end + 20) >= 0.97
    assert run.changes(start, end) and run.changes(end)


@pytest.mark.parametrize("plant", CURVED, ids=lambda plant: plant.name)
def test_devices_that_are_no_lines_are_balanced_and_plans_settle(plant):
    run = run_boa(plant, 600)
    assert run.ratio_to_limit(20) >= 0.97
    assert len(run.changes(100)) <= 6
    for peer in PEERS.values():
        other = simulate(peer(plant.num_replicas, plant.batch), plant, 600)
        assert run.ratio_to_limit(20) >= other.ratio_to_limit(20) - 0.01


@pytest.mark.parametrize("plant", STATIC, ids=lambda plant: plant.name)
def test_no_other_policy_is_better_by_more_than_a_percent(plant):
    best = run_boa(plant, 600).ratio_to_limit()
    for policy in (EvenPolicy, *PEERS.values()):
        other = policy(plant.num_replicas, plant.batch, upper=plant.upper)
        assert best >= simulate(other, plant, 600).ratio_to_limit() - 0.01


@pytest.mark.parametrize("n", [2, 4, 8])
def test_an_even_cluster_with_noise_and_outliers_is_left_alone(n):
    """Only two outliers of the same size in succession may be taken for a change."""
    plant = by_speeds("", (1,) * n, batch=32 * n, noise=0.05, spike_probability=0.02)
    runs = [run_boa(plant, 400, seed) for seed in range(8)]
    assert sum(not run.changes() for run in runs) >= 7
    assert min(run.ratio_to_limit() for run in runs) >= 0.95


def test_an_even_cluster_with_fixed_costs_and_partial_batches_is_left_alone():
    plant = by_speeds("", (1, 1, 1), fixed=0.02, batch=100, steps_per_epoch=5, noise=0.02)
    assert not run_boa(plant, 300).changes()


@pytest.mark.parametrize("factor", [10.0, 0.05])
def test_one_outlier_changes_nothing(factor):
    plant = by_speeds("", (4, 2, 1))
    policy = make_policy("min_max", 3, plant.batch)
    random = np.random.default_rng(0)
    simulate(policy, plant, 40)
    for step in range(40, 80):
        times = plant.measured(step, policy.shares, random)
        times[1] *= factor if step == 50 else 1.0
        policy.observe(step, policy.shares, times)
        assert policy.propose(step) is None


def test_the_plan_tells_what_it_was_derived_from():
    plant = by_speeds("", (2, 1), fixed=0.02)
    plan = run_boa(plant, 30).plans[-1]
    assert [model.fixed_seconds for model in plan.models] == pytest.approx([0.02] * 2, rel=0.05)
    assert [model.seconds_per_sample for model in plan.models] == pytest.approx(
        [1e-3, 2e-3], rel=0.05
    )
    assert plan.step_seconds == pytest.approx(plant.limit(0), rel=0.02)
    assert plan.gain > 0
    for replica, measured in enumerate(plan.measured):
        expected = plant.times(0, np.full(2, measured.share))[replica]
        assert measured.seconds == pytest.approx(expected)
        assert measured.count >= 2


HOPELESS = Plant("hopeless", (0.0, 0.0, 0.5), (1e-3, 1e-3, 1e-3))


def test_a_device_that_is_not_worth_using_gets_nothing_and_the_plan_says_so():
    run = run_boa(HOPELESS, 40)
    plan = run.plans[-1]
    assert plan.unused == (2,)
    assert plan.step_seconds_if_all_used == pytest.approx(0.5, rel=0.05)
    assert plan.step_seconds == pytest.approx(0.128, rel=0.05)
    assert "without using 2" in str(plan)
    assert run.steps_to_balance() <= 10


def test_it_is_tried_again_now_and_then_at_a_small_cost():
    run = run_boa(HOPELESS, 6000)
    tries = [plan.step for plan in run.plans if "tried again" in plan.reason]
    assert len(tries) >= 2
    assert run.ratio_to_limit(20) >= 0.97
    assert run.plans[-1].unused == (2,)


def test_it_comes_back_when_it_has_recovered():
    hopeless = (1.0, 1.0, 400.0)
    plant = by_speeds("", (1, 1, 1), factor=lambda t: hopeless if 20 <= t < 200 else (1.0,) * 3)
    recovering = dataclasses.replace(plant, fixed=(0.001,) * 3)
    run = run_boa(recovering, 3000)
    dropped = [plan for plan in run.plans if plan.unused]
    assert dropped and dropped[0].step < 40
    assert not run.plans[-1].unused
    assert run.seconds[-1] <= 1.03 * run.limits[-1]


def test_the_time_of_a_row_of_zeros_is_no_measurement():
    policy = make_policy("min_max", 2, 64, upper=[64, 0])
    policy.propose(-1)
    for step in range(30):
        policy.observe(step, (64, 0), [0.064, 1e-6])
        assert policy.propose(step) is None
    policy.set_upper(1, 64)
    for step in range(30, 60):
        policy.observe(step, (64, 0), [0.064, 1e-6])
        assert policy.propose(step) is None


def test_replicas_that_are_never_measured_keep_their_shares():
    policy = make_policy("min_max", 3, 90)
    policy.propose(-1)
    for step in range(30):
        shares = np.array(policy.shares)
        policy.observe(
            step, shares, np.where([True, True, False], shares * [1e-3, 2e-3, 1], np.nan)
        )
        policy.propose(step)
    assert policy.shares == (40, 20, 30)


def test_tries_back_off_and_are_rare_where_they_cost_much():
    cheap, waits = RetrySchedule(), []
    for _ in range(4):
        cheap.dropped(3, 0, 0.0)
        waits.append(next(step for step in range(10_000) if cheap.next_due(step) == 3))
        cheap.started(3)
        assert cheap.next_due(10_000) is None
    assert waits == [FIRST_WAIT, 2 * FIRST_WAIT, 4 * FIRST_WAIT, 8 * FIRST_WAIT]
    cheap.kept(3)
    cheap.dropped(3, 0, 0.0)
    assert cheap.next_due(FIRST_WAIT) == 3
    costly = RetrySchedule()
    costly.dropped(0, 0, 4.0)
    wait = round(STEPS_OF_A_TRY * 4.0 / COST)
    assert costly.next_due(wait - 1) is None and costly.next_due(wait) == 0
