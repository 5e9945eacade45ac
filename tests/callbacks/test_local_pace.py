"""Shares of workers that train on their own, by the speeds that an exchange says."""

import numpy as np
import pytest

from keras_het.local_training import local_steps as pace
from keras_het.local_training.local_steps import Pace, balanced_shares
from keras_het.planning import apportion


@pytest.mark.parametrize("speeds", [(4, 2, 1), (3, 1), (1, 1.2, 0.1, 7)])
def test_all_take_equally_long_at_the_new_shares(speeds):
    shares, number = [1.0] * len(speeds), 0
    while (
        found := balanced_shares(shares, np.divide(shares, speeds).tolist(), shares)
    ) is not None:
        shares, number = found, number + 1
    assert number <= 6
    np.testing.assert_allclose(shares / np.sum(shares), np.array(speeds) / sum(speeds), rtol=0.06)


def test_a_slow_moment_is_made_up_for():
    """Of 32 samples the second worker gets none after it stood still, and half of them later."""
    shares, seen = [31.0, 1.0], []
    for slow in (1e3, 1e3, 1, 1, 1, 1, 1, 1, 1):
        used = list(apportion(32, shares))
        seen.append(used[1])
        shares = balanced_shares(used, [used[0] / 2, used[1] * slow / 2], shares) or shares
    assert 0 in seen and seen[-1] in range(15, 18)


def test_fixed_costs_are_met_by_and_by():
    """A step of b samples takes 10 + b and 10 + 4 b: of 100, 80 and 20 take equally long."""
    shares = [50.0, 50.0]
    for _ in range(20):
        seconds = [10 + shares[0], 10 + 4 * shares[1]]
        shares = balanced_shares(shares, seconds, shares) or shares
    assert max(10 + shares[0], 10 + 4 * shares[1]) <= 1.05 * 90


def test_little_to_gain_changes_nothing():
    assert balanced_shares([50, 50], [1.0, 1.04], [1, 1]) is None
    assert balanced_shares([50, 50], [1.0, 1.2], [1, 1]) is not None


def test_who_has_no_samples_keeps_its_share():
    found = balanced_shares([30, 0, 30], [1.0, 0.0, 2.0], [1, 0, 1])
    assert found == pytest.approx([4 / 3, 0, 2 / 3])
    assert balanced_shares([30, 0], [1.0, 0.0], [1, 0]) is None


def test_waits_and_the_first_step_are_left_out(monkeypatch):
    now = 100.0
    monkeypatch.setattr(pace.time, "perf_counter", lambda: now)
    own = Pace()
    assert own.take_seconds() == 0.0
    now = 130.0
    own.steps_done(8)  # traced for 30 s
    now = 132.0
    own.steps_done(8)
    now = 135.0
    assert own.take_seconds() == 5.0 and own.take_samples() == 8
    now = 145.0
    own.leave_out(since=134.0)  # a wait that began before the end of the last period
    own.leave_out()  # and what followed the last step, which is the same time
    now = 146.0
    own.steps_done(8)
    assert own.take_seconds() == 1.0 and own.take_samples() == 8
