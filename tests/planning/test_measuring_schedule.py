"""Few steps are measured, within a budget; more at first, and after a sign of change."""

from __future__ import annotations

import numpy as np
import pytest

from keras_het.planning.measuring_schedule import (
    BURST,
    FIRST_INTERVAL,
    FIRST_STEPS,
    LONGEST_INTERVAL,
    MeasuringCost,
    MeasuringSchedule,
)


def measured(schedule: MeasuringSchedule, num_steps: int) -> list[int]:
    found = []
    for _ in range(num_steps):
        if schedule.is_due:
            found.append(schedule.step)
        schedule.step_ended()
    return found


def test_the_first_steps_and_then_every_so_many() -> None:
    schedule = MeasuringSchedule()
    first = list(range(FIRST_STEPS))
    later = [FIRST_STEPS - 1 + FIRST_INTERVAL * number for number in (1, 2, 3)]
    assert measured(schedule, later[-1] + 1) == first + later
    schedule.interval = 3
    assert measured(schedule, 6) == [later[-1] + 3, later[-1] + 6]
    schedule.interval = 1
    assert len(measured(schedule, 5)) == 5


def test_a_change_of_speed_is_watched_closely() -> None:
    schedule = MeasuringSchedule()
    measured(schedule, FIRST_STEPS)
    schedule.observe([4, 2, 0], [0.04, 0.02, 0.0])
    schedule.observe([3, 2, 0], [0.03, 0.022, 0.0])  # a smaller batch, about the same speeds
    assert not schedule.is_due
    schedule.observe([4, 2, 0], [0.04, 0.04, 0.0])
    assert len(measured(schedule, BURST + 2)) == BURST


def test_signs_that_come_to_nothing_are_followed_less_often() -> None:
    schedule = MeasuringSchedule()
    schedule.interval = 1000
    times = []
    for _ in range(600):
        schedule.watch_closely()
        times += measured(schedule, 1)
    starts = [step for step in times if step - 1 not in times]
    assert np.diff(starts).tolist() == [16, 24, 40, *[72] * (len(starts) - 4)]
    schedule.observe([3, 1], [0.1, 0.1])
    schedule.observe([2, 2], [0.1, 0.1])  # other shares
    assert len(measured(schedule, BURST + 2)) >= BURST


def observed(cost: MeasuringCost, durations: list[tuple[bool, float]]) -> list[bool]:
    return [cost.observe(*each) for each in durations]


def run_of(interval: int, host: float, device: float, number: int) -> list[tuple[bool, float]]:
    """Durations where a host takes a time to queue a step, and waits for each measured one."""
    plain, late = max(host, device), host + device
    row = [(True, late), (False, late), *[(False, plain)] * (interval - 2)]
    return row * number


@pytest.mark.parametrize(("host", "device"), [(0.0012, 0.0036), (0.014, 0.08), (0.03, 0.02)])
@pytest.mark.parametrize("budget", [0.02, 0.05])
def test_measuring_takes_the_part_of_the_time_that_it_may(
    host: float, device: float, budget: float
) -> None:
    cost = MeasuringCost(budget)
    assert cost.interval == 0
    observed(cost, run_of(FIRST_INTERVAL, host, device, 4))
    interval, plain = cost.interval, max(host, device)
    extra = 2 * (host + device) - 2 * plain
    wanted = int(np.ceil(extra / (budget * plain) - 1e-9))
    assert interval == max(FIRST_INTERVAL, min(wanted, LONGEST_INTERVAL))


def test_a_cost_that_seems_to_be_nothing_is_estimated_again() -> None:
    cost = MeasuringCost()
    observed(cost, run_of(FIRST_INTERVAL, 0.0, 0.05, 3))
    assert cost.interval == FIRST_INTERVAL  # were all steps measured, none could be compared
    observed(cost, run_of(cost.interval, 0.03, 0.05, 40))
    assert cost.interval > FIRST_INTERVAL


def test_a_single_long_step_is_no_sign_of_change() -> None:
    cost = MeasuringCost()
    usual = [(False, 0.01)] * 10
    assert not any(observed(cost, [*usual, (False, 0.05), *usual]))
    assert observed(cost, [(False, 0.02), (False, 0.02), (False, 0.02)]) == [False, True, False]
    cost.restart()
    assert not any(observed(cost, [(False, 0.02)] * 5))
    assert observed(cost, [(False, 0.01), (False, 0.01)])[1]


@pytest.mark.parametrize("phase", range(FIRST_INTERVAL))
@pytest.mark.parametrize("factor", [3.0, 1 / 3])
def test_a_lasting_change_is_seen_at_its_second_step(phase: int, factor: float) -> None:
    cost = MeasuringCost()
    before = run_of(FIRST_INTERVAL, 0.001, 0.02, 4)[: -FIRST_INTERVAL + phase]
    after = run_of(FIRST_INTERVAL, 0.001, 0.02 * factor, 4)[phase:]
    found = observed(cost, [*before, *after])
    was_measured = [measured for measured, _ in [*before, *after]]
    # a measured step shows by itself what has changed
    first = next(step for step in range(len(before), len(found)) if not was_measured[step])
    assert found.index(True) == first + (2 if was_measured[first + 1] else 1)


@pytest.mark.parametrize("jitter", [0.1, 0.2, 0.3])
def test_steps_that_always_vary_are_no_signs_of_change(jitter: float) -> None:
    num_signs, late = 0, []
    for seed in range(10):
        random = np.random.default_rng(seed)
        cost, before = MeasuringCost(), 0.01 * np.exp(jitter * random.standard_normal(500))
        for seconds in before:
            if cost.observe(False, seconds):
                num_signs += 1
                cost.restart()
        after = 0.03 * np.exp(jitter * random.standard_normal(20))
        late.append([*observed(cost, [(False, seconds) for seconds in after]), True].index(True))
    assert num_signs <= 10 * 500 * 0.006
    # once all was forgotten just before the change: then a measured step shows it
    assert sorted(late)[8] <= 3


def test_a_pause_is_no_step() -> None:
    cost = MeasuringCost()
    observed(cost, run_of(FIRST_INTERVAL, 0.01, 0.02, 4))
    before = cost.interval
    cost.restart()
    observed(cost, [(False, 9.0), *run_of(FIRST_INTERVAL, 0.01, 0.02, 1)[2:]])
    assert cost.interval == before
