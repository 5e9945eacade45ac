"""ASHL's algorithms 1 and 2, by hand and by what they promise."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_het.planning.roles.local_steps import (
    choose_local_steps,
    compression_ratios,
    plan_local_steps,
)

WORKERS = st.lists(
    st.tuples(st.floats(0.01, 5), st.floats(0, 5), st.floats(0, 5)), min_size=1, max_size=6
)


def test_algorithm_1_by_hand():
    # T_update = 4 * 1 + 2 + 1 = 7, 4 * 0.5 + 1 + 1 = 4, 4 * 0.25 + 0.5 + 0.5 = 2
    # H = (7 - 3) / 1, (7 - 2) / 0.5, (7 - 1) / 0.25
    steps = choose_local_steps([1.0, 0.5, 0.25], [2.0, 1.0, 0.5], [1.0, 1.0, 0.5], preset_steps=4)
    assert steps == (4, 10, 24)


def test_steps_are_rounded_to_the_nearest():
    assert choose_local_steps([1.0, 0.3], [0.0, 0.0], [0.0, 0.0], 4) == (4, 13)  # 13.33
    assert choose_local_steps([1.0, 0.7], [0.0, 0.0], [0.0, 0.0], 4) == (4, 6)  # 5.71
    assert choose_local_steps([1.0, 0.5], [0.0, 0.25], [0.0, 0.0], 1) == (1, 2)  # 1.5


def test_algorithm_2_by_hand():
    # T_base = 4 + 0.5 + 1 = 5.5, 5 + 0.5 + 1 = 6.5, 6 + 0.5 + 0.5 = 7
    # T_update = 5.5 + 0.2, 6.5 + 0.1, 7 + 0.05; T_max = 7.05
    ratios = compression_ratios(
        [1.0, 0.5, 0.25], [2.0, 1.0, 0.5], [1.0, 1.0, 0.5], (4, 10, 24), 0.1, 0.5
    )
    assert ratios == pytest.approx((1.55 / 2, 0.55, 0.1))
    # 1 + 0.1 * 1 = 1.1 against 9: more time than a full push takes
    assert compression_ratios([1.0, 9.0], [1.0, 0.0], [0.0, 0.0], (1, 1), 0.1) == (1.0, 1.0)


def test_plan_by_hand():
    plan = plan_local_steps(
        [1.0, 0.5, 0.25],
        [2.0, 1.0, 0.5],
        [1.0, 1.0, 0.5],
        4,
        preset_ratio=0.1,
        compress_seconds=0.5,
    )
    assert plan.steps == (4, 10, 24)
    assert plan.data_shares == pytest.approx((4 / 38, 10 / 38, 24 / 38))
    assert plan.samples(1000) == (105, 263, 632)
    assert plan.update_seconds == pytest.approx((7.05, 7.05, 7.05))


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


def test_what_cannot_be_planned_is_refused():
    with pytest.raises(ValueError, match=r"Received: preset_steps=0"):
        choose_local_steps([1.0], [1.0], [1.0], 0)
    with pytest.raises(ValueError, match=r"Received: iteration_seconds=\[0.0\]"):
        choose_local_steps([0.0], [1.0], [1.0], 1)
    with pytest.raises(ValueError, match=r"a push and a pull. Received: .* push_seconds=\[1.0\]"):
        choose_local_steps([1.0, 1.0], [1.0], [1.0, 1.0], 1)
    with pytest.raises(ValueError, match=r"Received: iteration_seconds=\[\]"):
        choose_local_steps([], [], [], 1)
    with pytest.raises(ValueError, match=r"at least 0. Received: push_seconds=\[-1.0\]"):
        choose_local_steps([1.0], [-1.0], [1.0], 1)
    with pytest.raises(ValueError, match=r"Received: preset_ratio=0.0"):
        compression_ratios([1.0], [1.0], [1.0], [1], 0.0)
    with pytest.raises(ValueError, match=r"compress_seconds=-1.0"):
        compression_ratios([1.0], [1.0], [1.0], [1], 0.5, -1.0)
    with pytest.raises(ValueError, match=r"2 workers .* Received: steps=\[1\]"):
        compression_ratios([1.0, 1.0], [1.0, 1.0], [1.0, 1.0], [1], 0.5)
