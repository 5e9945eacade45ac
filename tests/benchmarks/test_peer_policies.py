"""The published policies against a second writing of their equations."""

import numpy as np
import pytest
from _peer_policies import PEERS
from plants import by_speeds, simulate


def observed(policy, times, steps):
    """Plan after some steps with the same times."""
    policy.propose(-1)
    for step in range(steps):
        policy.observe(step, policy.shares, times)
        if plan := policy.propose(step):
            return step, plan
    return None, None


def test_proportional_equals_its_equations():
    times = np.array([0.010, 0.025, 0.040])
    step, plan = observed(PEERS["proportional"](3, 96), times, 10)
    shares = np.array([32.0, 32.0, 32.0])
    throughput, tau = shares / times, times - times.mean()
    corrected = shares - throughput * tau
    assert step == 2
    assert np.abs(np.array(plan.shares) - 96 * corrected / corrected.sum()).max() < 1


def test_proportional_has_a_dead_band():
    assert observed(PEERS["proportional"](2, 200), [1.0, 1.05], 50) == (None, None)
    assert observed(PEERS["proportional"](2, 200), [1.0, 1.2], 50)[1].shares == (109, 91)


def test_lbb_equals_its_equations():
    # SE below 0.05: nothing; below 0.3: one sample; above: the rescaled lines, solved
    assert observed(PEERS["lbb"](3, 96), [1.0, 1.0, 1.04], 20) == (None, None)
    assert observed(PEERS["lbb"](3, 96), [1.0, 1.1, 1.2], 20)[1].shares == (33, 32, 31)
    fixed, times = np.array([0.01, 0.02]), np.array([0.05, 0.2])
    _, plan = observed(PEERS["lbb"](2, 64, fixed_seconds=fixed.tolist()), times, 1)
    lines = (times - fixed) / 32
    best = min(
        range(65), key=lambda b: max(fixed[0] + lines[0] * b, fixed[1] + lines[1] * (64 - b))
    )
    assert plan.shares == (best, 64 - best)
    assert plan.step_seconds == pytest.approx(fixed[0] + lines[0] * best, rel=0.05)


def test_lbb_solves_at_most_once_in_thirty_steps():
    plant = by_speeds("", (1, 1), factor=lambda step: (1.0 + 2.0 * (step % 20 < 10), 1.0))
    run = simulate(PEERS["lbb"](plant.num_replicas, plant.batch), plant, 200)
    rapid = [plan.step for plan in run.plans if "min-max" in plan.reason]
    assert len(rapid) > 3
    assert min(np.diff(rapid)) >= 30


def test_lb_bsp_moves_samples_and_halves_when_it_swings():
    policy = PEERS["lb_bsp"](2, 256)
    step, plan = observed(policy, [1.0, 2.0], 20)
    assert (step, plan.shares) == (7, (136, 120))  # 256 / 32 samples after eight steps
    for step in range(8, 16):
        policy.observe(step, policy.shares, [2.0, 1.0])
        plan = policy.propose(step)
    assert plan.shares == (132, 124)  # the reverse move: half the samples
    for step in range(16, 32):
        assert plan is None or step == 16  # and twice the window
        policy.observe(step, policy.shares, [1.0, 2.0])
        plan = policy.propose(step)
    assert plan.shares == (134, 122)
