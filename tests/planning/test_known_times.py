"""What a resumed training knows of its devices, and the first plan that follows from it."""

import numpy as np
import pytest
from plants import by_speeds, simulate, slow_down

from keras_het.planning import LinearTimeModel, make_policy, min_max_shares_linear
from keras_het.planning.time_model import (
    KnownDevice,
    known_from_json,
    known_to_json,
    recall_times,
)

FAST, SLOW = LinearTimeModel(0.002, 0.001), LinearTimeModel(0.0, 0.1 / 3)
KNOWN = {
    "a": KnownDevice("x", FAST, 12),
    "b": KnownDevice("y", SLOW, 4),
    "c": KnownDevice("x", SLOW),
}


def test_what_is_known_survives_a_backup_bit_by_bit() -> None:
    assert known_from_json(known_to_json(KNOWN)) == KNOWN
    assert known_from_json("") == {}  # a backup without it


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ([("b", "y"), ("a", "x")], ([SLOW, FAST], [4, 12])),
        ([("b", "y")], ([SLOW], None)),
        ([("c", "x"), ("a", "x"), ("b", "y")], ([SLOW, FAST, SLOW], None)),
        ([("a", "x"), ("new", "y"), ("new", "z"), ("", "")], ([FAST, SLOW, None, None], None)),
    ],
    ids=["the same in another order", "one is gone", "one is back", "new ones"],
)
def test_devices_are_known_by_identity_and_new_ones_by_product(devices, expected) -> None:
    assert recall_times(KNOWN, devices) == expected


def test_devices_without_the_name_of_a_product_are_not_alike() -> None:
    known = {**KNOWN, "d": KnownDevice("", SLOW)}
    assert recall_times(known, [("new", "")]) == ([None], None)


def test_a_new_device_is_as_fast_as_its_product_on_average() -> None:
    (times,), _ = recall_times(KNOWN, [("new", "x")])
    assert (times.fixed_seconds, times.seconds_per_sample) == (0.001, (0.001 + 0.1 / 3) / 2)


def test_the_first_plan_is_the_optimum_for_known_times() -> None:
    policy = make_policy("min_max", 2, 100)
    policy.recall([FAST, SLOW])
    expected = min_max_shares_linear(
        [0.002, 0.0], [0.001, 0.1 / 3], 100, np.zeros(2, int), np.full(2, 100)
    )
    plan = policy.propose(-1)
    assert plan.shares == tuple(expected)
    assert plan.reason == "known device times"


def test_unknown_devices_have_an_even_share_at_first() -> None:
    policy = make_policy("min_max", 4, 100)
    policy.recall([FAST, None, SLOW, None])
    shares = policy.propose(-1).shares
    assert shares[1] == shares[3] == 25 and shares[0] > 40 > 10 > shares[2]
    assert sum(shares) == 100


def test_without_anything_known_the_first_plan_is_even() -> None:
    policy = make_policy("min_max", 2, 100)
    policy.recall([None, None])
    assert policy.propose(-1).reason == "even split"


def resumed(before, after, steps=60):
    """A training on a plant, and one that continues from it on another plant."""
    first = make_policy("min_max", before.num_replicas, before.batch)
    simulate(first, before, steps)
    again = make_policy("min_max", after.num_replicas, after.batch)
    again.recall(first.models[: after.num_replicas])
    return again, simulate(again, after, steps)


def test_what_is_known_balances_from_the_first_step_on() -> None:
    _, run = resumed(by_speeds("8:4:2:1", (8, 4, 2, 1)), by_speeds("8:4:2", (8, 4, 2)))
    assert run.steps_to_balance() == 0
    assert not run.changes()


def test_a_device_that_became_slower_meanwhile_is_measured_again() -> None:
    plant = by_speeds("4:2:1", (4, 2, 1), factor=slow_down(0, 3, 0, 10**6))
    policy, run = resumed(by_speeds("4:2:1", (4, 2, 1)), plant)
    assert 0 < run.steps_to_balance() <= 10
    assert policy.models[0].seconds_per_sample == pytest.approx(3e-3, rel=0.05)


def test_a_device_that_had_no_share_is_tried_again() -> None:
    policy = make_policy("min_max", 2, 100)
    policy.recall([FAST, LinearTimeModel(0.2, 0.001)], [100, 0])
    plan = policy.propose(-1)
    assert plan.shares == (100, 0)
    for step in range(2_000):
        policy.observe(step, policy.shares, np.where(np.array(policy.shares) > 0, 0.1, np.nan))
        if (plan := policy.propose(step)) is not None:
            break
    assert plan is not None and plan.reason == "replica 1 is tried again"
