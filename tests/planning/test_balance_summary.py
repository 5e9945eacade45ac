"""The summary of a balancer: against the truth of simulated devices."""

from __future__ import annotations

import numpy as np
import pytest

from keras_het.planning import BalancePlan, LinearTimeModel, MicroBatchTimeModel, make_policy
from keras_het.planning.balance.summary import summarize

FIXED, SLOPE = np.array([0.002, 0.002, 0.004]), np.array([1e-3, 2e-3, 4e-3])
BATCH = 96


def train(policy, steps, noise=0.0, times=None, lag=2):
    """Plans and measurements of a training; plans take effect some steps later."""
    random = np.random.default_rng(0)
    plans, rows = [policy.propose(-1)], []
    queue = [plans[0].shares] * lag
    for step in range(steps):
        shares = np.array(queue.pop(0))
        seconds = (FIXED + SLOPE * shares) if times is None else times(step, shares)
        seconds = seconds * np.exp(noise * random.normal(size=len(shares)))
        seconds = np.where(shares > 0, seconds, np.nan)
        rows.append({"step": step, "shares": shares.tolist(), "seconds": seconds.tolist()})
        policy.observe(step, shares, seconds)
        plan = policy.propose(step)
        plans += [plan] if plan is not None else []
        queue.append(policy.shares)
    return plans, rows


@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_times_come_from_the_devices(noise):
    plans, rows = train(make_policy("min_max", 3, BATCH), 120, noise)
    summary = summarize("min_max", plans, rows)
    assert summary.first == (32, 32, 32)
    assert summary.now == plans[-1].shares
    now = (FIXED + SLOPE * summary.now).max()
    even = (FIXED + SLOPE * 32).max()
    assert summary.step_seconds == pytest.approx(now, rel=0.001 + 2 * noise)
    assert summary.even_seconds == pytest.approx(even, rel=0.001 + 2 * noise)
    assert summary.gain == pytest.approx(even / now, rel=0.001 + 2 * noise)
    expected = (FIXED + SLOPE * summary.now) / summary.now
    np.testing.assert_allclose(summary.seconds_per_sample, expected, rtol=0.001 + noise)
    text = str(summary)
    assert (
        f"BatchBalancer (min_max): even shares would take {summary.even_seconds * 1e3:.3g} ms"
        in text
    )
    assert f"{len(plans)} plans; 120 measured steps." in text
    assert text.count("\n") == (5 if not summary.reverted else 7)


def test_times_of_shares_in_parts_are_known_where_a_line_would_miss():
    models = MicroBatchTimeModel(0.05, 1e-3, 0.05, 25), LinearTimeModel(0.0, 1e-4)
    rows = [
        {
            "step": step,
            "shares": shares,
            "seconds": [times.seconds(b) for times, b in zip(models, shares, strict=True)],
        }
        for step, shares in enumerate([[40, 20]] * 9 + [[10, 50]] * 9 + [[20, 40]] * 9)
    ]
    plan = BalancePlan(0, "min_max", (20, 40), "", models=models)
    summary = summarize("min_max", [plan], rows)
    assert summary.even_seconds == pytest.approx(models[0].seconds(30), rel=0.02)


def test_even_shares_have_gained_nothing():
    summary = summarize("even", *train(make_policy("even", 3, BATCH), 5))
    assert summary.gain == pytest.approx(1.0)
    assert "no difference" in str(summary)


def test_shares_that_are_worse_than_even_ones_are_called_so():
    policy = make_policy("static", 3, BATCH, weights=[1, 1, 8])
    summary = summarize("static", *train(policy, 5))
    assert summary.gain < 0.6
    assert "times as slow" in str(summary)


def test_before_any_measurement_it_says_so():
    plan = make_policy("min_max", 3, BATCH).propose(-1)
    for plans in ([], [plan]):
        text = str(summarize("min_max", plans, []))
        assert "has measured nothing yet" in text
        assert "\n" not in text


def test_a_warm_up_and_a_smaller_last_batch_do_not_count():
    plans, rows = train(make_policy("min_max", 3, BATCH), 60)
    expected = summarize("min_max", plans, rows)
    rows[0]["seconds"] = [30.0, 30.0, 30.0]
    rows.append({"step": 60, "shares": [3, 2, 1], "seconds": [0.1, 0.1, 0.1]})
    summary = summarize("min_max", plans, rows)
    assert summary.now == expected.now
    assert summary.step_seconds == pytest.approx(expected.step_seconds)
    assert summary.even_seconds == pytest.approx(expected.even_seconds, rel=1e-3)


def test_a_reverted_move_is_reported_with_its_reason():
    # Times of the whole step do not follow shares: no plan keeps its promise.
    policy = make_policy("min_max", 3, BATCH)
    observe = policy.observe
    policy.observe = lambda *given: (policy.observe_step_seconds(0.5), observe(*given))
    plans, rows = train(policy, 200, 0.001)
    summary = summarize("min_max", plans, rows)
    assert summary.reverted
    assert "Reverted, because steps did not become as short as predicted" in str(summary)
    assert "500 ms a step measured, 500 ms before" in str(summary)


def test_replicas_without_measurements_count_as_free():
    row = {"step": 0, "shares": [4, 0], "seconds": [0.4, None]}
    summary = summarize("static", [], [row, {**row, "step": 1}])
    assert summary.never_measured == (1,)
    assert summary.even_seconds == pytest.approx(0.2)
    assert "Never measured, and counted as free: replica 1." in str(summary)
    assert "unknown" in str(summary)


def test_nothing_but_unknown_times():
    row = {"step": 0, "shares": [0, 0], "seconds": [np.nan, np.nan]}
    assert "no compute times are known" in str(summarize("min_max", [], [row]))


def test_many_replicas_are_the_slowest_ones():
    n = 40
    seconds = [0.01 + 0.001 * replica for replica in range(n)]
    row = {"step": 0, "shares": [2] * n, "seconds": seconds}
    plan = BalancePlan(-1, "even", (2,) * n, "even split")
    lines = str(summarize("even", [plan], [row] * 3)).splitlines()
    assert lines[-1] == "and 24 others, which are faster"
    assert lines[-2].split()[0] == "39"
    assert len(lines) == 20


def test_rows_of_two_balancers_are_refused():
    rows = [{"step": 0, "shares": [1] * n, "seconds": [0.1] * n} for n in (2, 3)]
    with pytest.raises(ValueError, match="one share and one time for each replica"):
        summarize("min_max", [], rows)
