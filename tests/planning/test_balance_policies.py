"""What every policy promises, on simulated clusters."""

import dataclasses
import doctest
import itertools
import json

import numpy as np
import pytest
from plants import BATCH, STATIC, Plant, by_speeds, simulate, slow_down

from keras_het.planning.balance import POLICIES, BalancePlan, BalancePolicy, make_policy
from keras_het.planning.balance import policy as policies

NAMES = sorted(POLICIES)
PLANTS = [
    *STATIC,
    by_speeds("slow-down", (2, 1), factor=slow_down(0, 2, 30, 60)),
    by_speeds("noise", (4, 2, 1), noise=0.1, spike_probability=0.05),
    by_speeds("partial batches", (4, 2, 1), steps_per_epoch=7, noise=0.05),
    Plant("hopeless", (0.0, 0.0, 0.5), (1e-3, 1e-3, 1e-3)),
    by_speeds("one replica", (1,)),
    by_speeds("fewer samples than replicas", (4, 2, 1, 1), batch=3),
]


def make(name, plant, **options):
    return make_policy(name, plant.num_replicas, plant.batch, upper=plant.upper, **options)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name)
def test_plans_keep_the_batch_and_the_bounds_and_survive_json(name, plant):
    policy = make(name, plant)
    assert isinstance(policy, BalancePolicy)
    run = simulate(policy, plant, 90, seed=3, hide=0.1)
    upper = plant.upper or (plant.batch,) * plant.num_replicas
    assert run.plans[0].step == -1
    for before, plan in zip([None, *run.plans], run.plans, strict=False):
        assert sum(plan.shares) == plant.batch
        assert all(
            type(share) is int and 0 <= share <= most
            for share, most in zip(plan.shares, upper, strict=True)
        )
        assert plan.policy == name
        assert before is None or plan.shares != before.shares
        assert json.loads(json.dumps(plan.to_dict())) == plan.to_dict()
        begin = f"step {plan.step}: shares" if plan.step >= 0 else "initial shares"
        assert str(plan).startswith(f"{begin} {plan.shares[0]}")
        assert "\n" not in str(plan)
        with pytest.raises(dataclasses.FrozenInstanceError):
            plan.shares = ()
    assert run.plans[-1].shares == policy.shares


@pytest.mark.parametrize("name", NAMES)
def test_the_same_observations_give_the_same_plans(name):
    plant = by_speeds("", (4, 2, 1, 1), noise=0.1, spike_probability=0.05, steps_per_epoch=9)
    runs = [simulate(make(name, plant), plant, 80, seed=5, hide=0.2) for _ in range(2)]
    assert runs[0].plans == runs[1].plans
    assert runs[0].shares == runs[1].shares


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("lookahead", [0, 2, 8])
def test_no_plan_is_decided_before_the_last_one_is_in_effect(name, lookahead):
    plant = by_speeds("", (8, 4, 1), noise=0.05)
    run = simulate(make(name, plant), plant, 100, lookahead=lookahead)
    steps = [plan.step for plan in run.plans[1:]]  # the first one is in effect from the start
    # after step s, steps s + 1 to s + lookahead still have the old shares
    assert all(later - sooner > lookahead for sooner, later in itertools.pairwise(steps))


@pytest.mark.parametrize("name", NAMES)
def test_without_any_time_nothing_changes(name):
    policy = make_policy(name, 3, 64)
    policy.propose(-1)
    for step in range(40):
        policy.observe(step, policy.shares, np.full(3, np.nan))
        assert policy.propose(step) is None


@pytest.mark.parametrize("name", NAMES)
def test_a_new_upper_bound_is_obeyed_at_once(name):
    plant = by_speeds("", (4, 2, 1))
    policy = make(name, plant)
    simulate(policy, plant, 12)
    policy.set_upper(0, 50)
    plan = policy.propose(12)
    assert plan is not None
    assert plan.shares[0] <= 50 and sum(plan.shares) == BATCH
    assert policy.shares == plan.shares
    random = np.random.default_rng(0)
    for step in range(13, 60):
        policy.observe(step, policy.shares, plant.measured(step, policy.shares, random))
        policy.propose(step)
        assert policy.shares[0] <= 50
    policy.set_upper(0, 60)  # nothing to obey
    with pytest.raises(ValueError, match="upper bounds to"):
        policy.set_upper(1, 10)
        policy.set_upper(2, 10)
    with pytest.raises(IndexError, match="from 0 to 2"):
        policy.set_upper(3, 1)


@pytest.mark.parametrize("name", NAMES)
def test_another_global_batch_size(name):
    policy = make_policy(name, 3, 90)
    policy.propose(-1)
    policy.set_global_batch_size(180)
    plan = policy.propose(0)
    assert sum(plan.shares) == 180
    policy.set_global_batch_size(180)
    policy.observe(1, policy.shares, np.array(policy.shares) / 1e3)
    assert policy.propose(1) is None


@pytest.mark.parametrize("name", NAMES)
def test_lower_bounds_are_kept(name):
    plant = Plant("", (0.0, 0.3), (1e-3, 1e-3))
    run = simulate(make(name, plant, lower=[0, 7]), plant, 80)
    assert all(plan.shares[1] >= 7 for plan in run.plans)


@pytest.mark.parametrize("name", NAMES)
def test_wrong_lengths_are_refused(name):
    policy = make_policy(name, 3, 64)
    with pytest.raises(ValueError, match="one share and one time for each of 3 replicas"):
        policy.observe(0, [32, 32], [1.0, 1.0])
    with pytest.raises(ValueError, match="No shares within the bounds"):
        make_policy(name, 2, 64, upper=[10, 10])


def test_policies_by_name_or_object():
    policy = make_policy("min_max", 2, 8)
    assert make_policy(policy, 2, 8) is policy
    with pytest.raises(ValueError, match=r"policy='bao'\. Expected one of \['even', 'min_max'"):
        make_policy("bao", 2, 8)
    with pytest.raises(TypeError, match="must be a name or an instance of a subclass"):
        make_policy(3, 2, 8)
    with pytest.raises(TypeError, match="takes no options here"):
        make_policy(policy, 2, 8, lower=[1, 1])


def test_weights_of_the_static_policy():
    assert make_policy("static", 3, 70, weights=[4, 2, 1]).shares == (40, 20, 10)
    assert make_policy("static", 2, 8, weights=[3, 1], upper=[5, 8]).shares == (5, 3)
    assert make_policy("static", 2, 8).shares == (4, 4)
    policy = make_policy("static", 3, 70, weights=[4, 2, 1])
    assert "weights 4 2 1" in str(policy.propose(0))
    policy.set_upper(0, 10)
    assert policy.propose(1).shares == (10, 40, 20)
    with pytest.raises(ValueError, match="one weight for each of 3 replicas"):
        make_policy("static", 3, 70, weights=[1, 2])


def test_a_plan_on_one_line():
    plan = BalancePlan(12, "min_max", (73, 37, 18), "min-max", (), 0.023, 0.0412)
    assert str(plan) == (
        "step 12: shares 73 37 18 (min_max: min-max; predicted compute time 41.2 -> 23.0 ms)"
    )
    assert plan.gain == pytest.approx(1 - 23 / 41.2)
    assert "(10000 replicas)" in str(BalancePlan(0, "even", (1,) * 10_000, "even split"))


def test_the_example_of_a_policy_is_right():
    assert doctest.testmod(policies).failed == 0
    assert "LatestSpeeds" in BalancePolicy.__doc__
