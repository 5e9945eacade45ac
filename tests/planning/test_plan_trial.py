"""Plans that do not keep their promise are reverted."""

import numpy as np
import pytest

from keras_het.planning import make_policy
from keras_het.planning.balance.plan_trial import PlanTrial

OLD, NEW = np.array([8, 8]), np.array([12, 4])


def trial_with(before, after, gain=0.2):
    trial = PlanTrial()
    for seconds in before:
        trial.observe(OLD, seconds)
    trial.begin(OLD, NEW, gain)
    for seconds in after:
        trial.observe(NEW, seconds)
    return trial


@pytest.mark.parametrize(
    ("after", "kept"), [(0.8, True), (0.94, True), (0.96, False), (1.0, False), (1.3, False)]
)
def test_a_quarter_of_the_gain_must_come_true(after, kept):
    trial = trial_with([1.0] * 8, [after] * 8)
    shares = trial.shares_to_return_to()
    assert (shares is None) == kept
    assert trial.distrust == (1 if kept else 2)
    assert kept or shares.tolist() == OLD.tolist()


def test_judged_once_and_not_too_early():
    trial = trial_with([1.0] * 8, [2.0] * 7)
    assert trial.shares_to_return_to() is None
    trial.observe(NEW, 2.0)
    assert trial.shares_to_return_to() is not None
    trial.observe(NEW, 2.0)
    assert trial.shares_to_return_to() is None


def test_what_has_failed_may_be_tried_again_later_and_later():
    trial = trial_with([1.0] * 8, [2.0] * 8)
    for wait in (1024, 2048, 4096):
        assert trial.shares_to_return_to() is not None
        for _ in range(wait - 1):
            trial.observe(OLD, 1.0)
        assert trial.refused(NEW) and trial.distrust == 2
        trial.observe(OLD, 1.0)
        assert not trial.refused(NEW) and trial.distrust == 1
        trial.begin(OLD, NEW, 0.2)
        for _ in range(8):
            trial.observe(NEW, 2.0)


def test_a_good_plan_that_came_at_a_bad_moment_gets_another_chance():
    """Another program holds up all steps just while the plan is judged."""
    policy = make_policy("min_max", 2, 16)
    shares, disturbed, used, plans = policy.propose(-1).shares, 10, [], []
    for step in range(1200):
        seconds = np.array([0.001, 0.0013]) * shares
        is_held_up = shares != (8, 8) and disturbed > 0
        disturbed -= is_held_up
        policy.observe_step_seconds(seconds.max() + 0.005 * is_held_up)
        policy.observe(step, shares, seconds)
        plan = policy.propose(step)
        plans += [str(plan)] if plan is not None else []
        shares = plan.shares if plan is not None else shares
        used.append(tuple(shares))
    assert any("reverted" in plan for plan in plans)
    assert set(used[100:900]) == {(8, 8)}
    assert used[-1] == (9, 7)


def test_outliers_do_not_decide():
    assert trial_with([1.0] * 8, [0.8] * 5 + [9.0] * 3).shares_to_return_to() is None


def test_another_plan_in_between_ends_the_trial():
    trial = trial_with([1.0] * 8, [2.0] * 4)
    trial.observe(OLD, 2.0)
    for _ in range(8):
        trial.observe(NEW, 2.0)
    assert trial.shares_to_return_to() is None


@pytest.mark.parametrize(
    ("change", "seconds"),
    # better than 2, whatever was before; and as long as a batch of twice the size takes
    [(lambda trial: trial.speed_changed(3), 1.5), (PlanTrial.batch_changed, 4.0)],
)
def test_a_change_ends_the_trial_and_makes_old_steps_no_comparison(change, seconds):
    trial = trial_with([1.0] * 8, [2.0] * 8)
    change(trial)
    assert trial.shares_to_return_to() is None
    trial.begin(NEW, OLD, 0.2)
    for _ in range(8):
        trial.observe(OLD, seconds)
    assert trial.shares_to_return_to() is None


def test_the_first_plan_of_a_larger_batch_is_not_compared_with_steps_of_the_smaller_one():
    """Replicas that are even at 16 samples, as fixed costs make them, are not at 64."""
    fixed, slope = np.array([4.0e-3, 2.4e-3]), np.array([0.1e-3, 0.3e-3])
    policy = make_policy("min_max", 2, 16)
    shares, plans = policy.propose(-1).shares, []
    for step in range(300):
        if step == 50:
            policy.set_global_batch_size(64)
            shares = (32, 32)
        seconds = fixed + slope * shares
        policy.observe_step_seconds(1e-3 + seconds.max())
        policy.observe(step, shares, seconds)
        plan = policy.propose(step)
        plans += [str(plan)] if plan is not None else []
        shares = plan.shares if plan is not None else shares
    assert not [plan for plan in plans if "reverted" in plan]
    assert shares == (44, 20)


def test_where_whole_steps_do_not_follow_compute_times_shares_go_back():
    """Compute times promise 40 % for (12, 4); the steps as a whole only get longer by it."""
    policy = make_policy("min_max", 2, 16)
    plan = policy.propose(-1)
    shares, used, plans = plan.shares, [], []
    for step in range(400):
        seconds = np.array([0.001, 0.003]) * shares
        policy.observe_step_seconds(0.05 + 0.002 * abs(shares[0] - 8))
        policy.observe(step, shares, seconds)
        plan = policy.propose(step)
        plans += [str(plan)] if plan is not None else []
        shares = plan.shares if plan is not None else shares
        used.append(tuple(shares))
    assert (12, 4) in used[:20]
    assert len(plans) == 2 and "reverted: 58 ms a step measured, 50 ms before" in plans[1]
    assert set(used[20:]) == {(8, 8)}
