"""ASHL's algorithms 1 and 2, by hand and by what they promise."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_het.planning import plan_local_steps

WORKERS = st.lists(
    st.tuples(st.floats(0.01, 5), st.floats(0, 5), st.floats(0, 5)), min_size=1, max_size=6
)


def steps_of(iteration_seconds, push_seconds, pull_seconds, preset_steps):
    return plan_local_steps(iteration_seconds, push_seconds, pull_seconds, preset_steps).steps


def test_steps_are_rounded_to_the_nearest():
    assert steps_of([1.0, 0.3], [0.0, 0.0], [0.0, 0.0], 4) == (4, 13)  # 13.33
    assert steps_of([1.0, 0.7], [0.0, 0.0], [0.0, 0.0], 4) == (4, 6)  # 5.71
    assert steps_of([1.0, 0.5], [0.0, 0.25], [0.0, 0.0], 1) == (1, 2)  # 1.5


def test_plan_by_hand():
    plan = plan_local_steps(
        [1.0, 0.5, 0.25],
        [2.0, 1.0, 0.5],
        [1.0, 1.0, 0.5],
        4,
        preset_ratio=0.1,
        compress_seconds=0.5,
    )
    # T_update = 4 * 1 + 2 + 1 = 7, 4 * 0.5 + 1 + 1 = 4, 4 * 0.25 + 0.5 + 0.5 = 2
    # H = (7 - 3) / 1, (7 - 2) / 0.5, (7 - 1) / 0.25
    assert plan.steps == (4, 10, 24)
    assert plan.data_shares == pytest.approx((4 / 38, 10 / 38, 24 / 38))
    # T_base = 4 + 0.5 + 1 = 5.5, 5 + 0.5 + 1 = 6.5, 6 + 0.5 + 0.5 = 7
    # T_update = 5.5 + 0.2, 6.5 + 0.1, 7 + 0.05; T_max = 7.05
    assert plan.compression_ratios == pytest.approx((1.55 / 2, 0.55, 0.1))
    assert plan.update_seconds == pytest.approx((7.05, 7.05, 7.05))
    # 1 + 0.1 * 1 = 1.1 against 9: more time than a full push takes; who pushes in no time sends all
    plan = plan_local_steps([1.0, 9.0], [1.0, 0.0], [0.0, 0.0], 1, preset_ratio=0.1)
    assert plan.compression_ratios == (1.0, 1.0)


@given(workers=WORKERS, preset=st.integers(1, 20), ratio=st.floats(0.001, 1))
def test_everyone_is_done_when_the_slowest_is(workers, preset, ratio):
    iteration, push, pull = zip(*workers, strict=True)
    plan = plan_local_steps(iteration, push, pull, preset, ratio, 0.1)
    updates = [t * preset + up + down for t, up, down in workers]
    slowest = updates.index(max(updates))
    assert plan.steps[slowest] == preset
    for (step, up, down), own in zip(workers, plan.steps, strict=True):
        assert own >= preset
        # within half a step of the slowest one, with a full push
        assert abs(own * step + up + down - max(updates)) <= step / 2 + 1e-6
    assert math.fsum(plan.data_shares) == pytest.approx(1.0)
    shortest = [
        step * own + 0.1 + up * ratio + down
        for (step, up, down), own in zip(workers, plan.steps, strict=True)
    ]
    for own, seconds in zip(plan.compression_ratios, plan.update_seconds, strict=True):
        assert ratio * (1 - 1e-12) <= own <= 1
        assert seconds <= max(shortest) + 1e-9
        # time is left to who sends everything, and to nobody else
        assert own == 1 or seconds == pytest.approx(max(shortest))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1.0], [1.0], [1.0], 0), r"Received: preset_steps=0"),
        (([0.0], [1.0], [1.0], 1), r"Received: iteration_seconds=\[0.0\]"),
        (
            ([1.0, 1.0], [1.0], [1.0, 1.0], 1),
            r"a push and a pull. Received: .* push_seconds=\[1.0\]",
        ),
        (([], [], [], 1), r"Received: iteration_seconds=\[\]"),
        (([1.0], [-1.0], [1.0], 1), r"at least 0. Received: push_seconds=-1.0"),
        (([1.0], [1.0], [1.0], 1, 0.0), r"Received: preset_ratio=0.0"),
        (([1.0], [1.0], [1.0], 1, 0.5, -1.0), r"compress_seconds=-1.0"),
    ],
)
def test_what_cannot_be_planned_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        plan_local_steps(*arguments)
