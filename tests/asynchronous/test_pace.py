"""The measured speed of a task, and the steps between its exchanges that follow from it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from service_doubles import Clock

from keras_het.asynchronous.exchange.pace import (
    FIRST_PERIOD,
    Pace,
    PushPace,
    choose_period,
)
from keras_het.planning import plan_pushes
from keras_het.planning.roles.exchange_settings import (
    LARGEST_OVERHEAD,
    ExchangeSettings,
    Pusher,
    longest_period,
    periods_of,
)

HEARD, LIMITS = 1.0, (20.0, 1000)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def pace(clock):
    return PushPace(clock)


def steps(pace, clock, number, seconds, samples=8):
    for _ in range(number):
        clock.sleep(seconds)
        pace.computed(1, samples)


def exchange(pace, clock, own=0.0, travel=0.0, hidden_by=0.0, measures=False):
    with pace.exchanging():
        clock.sleep(own)
        pace.sent()
        if measures:
            with pace.waiting(measures=True):
                clock.sleep(travel)
    if not measures:
        steps(pace, clock, 1, hidden_by)
        with pace.exchanging(), pace.waiting():
            clock.sleep(max(travel - hidden_by, 0.0))


def test_speed_is_that_of_computation_alone(clock, pace):
    steps(pace, clock, 2, 5.0)  # traced
    assert pace.pace is None
    for _ in range(4):
        steps(pace, clock, 3, 0.1)
        exchange(pace, clock, own=0.02, travel=1.0, measures=True)
    assert pace.pace == pytest.approx(Pace(80.0, 8, 1.0, answer_seconds=1.0))


def test_steps_of_a_device_that_works_ahead_end_where_the_exchange_waits_for_it(clock):
    left = [0.0]

    def wait():
        clock.sleep(left.pop())
        left.append(0.0)

    pace = PushPace(clock, wait_for_devices=wait)
    for _ in range(4):
        steps(pace, clock, 4, 0.01)  # what the host takes to queue one
        left[0] = 4 * (0.1 - 0.01)
        exchange(pace, clock, own=0.02, travel=1.0, measures=True)
        with pace.exchanging():  # without steps in between
            clock.sleep(0.02)
    assert pace.pace == pytest.approx(Pace(80.0, 8, 1.0, answer_seconds=1.0))


def test_what_is_done_with_an_early_answer_is_part_of_the_exchange(clock, pace):
    steps(pace, clock, 2, 5.0)  # traced
    for _ in range(4):
        steps(pace, clock, 1, 0.1)
        with pace.taking_early():
            clock.sleep(0.03)
        steps(pace, clock, 2, 0.1)
        exchange(pace, clock, own=0.02, travel=0.1, measures=True)
    assert pace.pace == pytest.approx(
        Pace(80.0, 8, 2 * 0.05 / LARGEST_OVERHEAD, answer_seconds=0.1)
    )


@pytest.mark.parametrize(
    ("waits", "traced", "own", "travel", "hidden_by", "seconds"),
    [
        (False, 0.0, 0.0, 0.7, 0.1, 0.7),  # it was waited for
        # own work of 0.04 s every second time: the median of (0.04, 0) is a tenth of half of 0.4 s
        (False, 9.0, 0.04, 0.05, 0.1, 0.4),
        (True, 9.0, 0.1, 0.5, None, 12.0),  # nothing hides it: 0.6 s are a tenth of half of it
    ],
)
def test_seconds_of_an_exchange(clock, waits, traced, own, travel, hidden_by, seconds):
    pace = PushPace(clock, waits=waits)
    steps(pace, clock, 4, 0.1)
    if traced:
        with pace.exchanging():
            clock.sleep(traced)
    if hidden_by is None:
        exchange(pace, clock, own, travel, measures=True)
    else:
        exchange(pace, clock, own, travel, hidden_by)
    assert pace.pace.exchange_seconds == pytest.approx(seconds)


def test_it_is_measured_at_first_and_then_now_and_then(pace):
    due = []
    for _ in range(20):
        due.append(pace.is_due)
        with pace.exchanging():
            pass
    assert [number for number, is_due in enumerate(due) if is_due] == [0, 1, 8, 16]


# The slow one takes 0.4 s for a batch: the fast one takes 20 of its own meanwhile.
FAST, SLOW, SILENT = (800.0, 16, 0.0), (20.0, 8, 0.1), (0.0, 0, 0.0)
BESIDE_SLOW, ALONE = [HEARD, HEARD], [HEARD, 21.0, HEARD]


@pytest.mark.parametrize(
    ("paces", "silence", "periods", "limits", "least"),
    [
        ([FAST, SLOW], BESIDE_SLOW, (20, 1), LIMITS, 1),
        # behind a slow link everybody exchanges less often
        ([FAST, (20.0, 8, 2.2)], BESIDE_SLOW, (55, 3), LIMITS, 1),
        # what only some rules measure changes nothing
        ([(*FAST, 0.5), (*SLOW, 9.0)], BESIDE_SLOW, (20, 1), LIMITS, 1),
        # who is silent or said nothing does not count; itself it always counts
        ([FAST, SLOW, SILENT], ALONE, (1, 1, FIRST_PERIOD), LIMITS, 1),
        ([SILENT, SLOW, FAST], ALONE, (FIRST_PERIOD, 1, 1), LIMITS, 1),
        # there are some exchanges in an epoch
        ([FAST, (0.1, 8, 0.1)], BESIDE_SLOW, (10, 1), (20.0, longest_period(80)), 1),
        # which do not bind a rule of long periods
        ([(80.0, 16, 0.0), SLOW], BESIDE_SLOW, (100, 50), (20.0, longest_period(160, 50)), 50),
        ([SILENT], [HEARD], (50,), LIMITS, 50),
    ],
)
def test_periods_by_hand(paces, silence, periods, limits, least):
    found = [choose_period(paces, silence, i, limits, least) for i in range(len(paces))]
    assert found == list(periods)
    assert longest_period(3) == 1


PACES = st.lists(
    st.tuples(st.floats(1, 500), st.integers(1, 64), st.floats(0, 3)), min_size=1, max_size=6
)


@given(PACES)
def test_all_push_as_planned_whoever_computes_it(paces):
    plan = plan_pushes(*(list(column) for column in zip(*paces, strict=True)))
    silence, far = np.zeros(len(paces)), (20.0, 1 << 40)
    periods = [choose_period(paces, silence, client, far) for client in range(len(paces))]
    samples = [period * batch for period, (_, batch, _) in zip(periods, paces, strict=True)]
    assert tuple(samples) == plan.samples


def test_roles_are_predicted_for_the_periods_that_tasks_plan():
    group, worker = Pusher(48.0, 0.06, 0.0, 0.015, 1), Pusher(24.0, 0.1, 0.35, 0.008, 2)
    paces = [Pace(48 / 0.06, 48.0, 2 * 0.015 / LARGEST_OVERHEAD), Pace(24 / 0.1, 24.0, 0.35)]
    predicted = periods_of(ExchangeSettings(period=None, num_batches=300), [group, worker])
    for client, parts in enumerate((1, 2)):
        limits = (20.0, longest_period(300 * parts))
        assert choose_period(paces, [HEARD] * 2, client, limits) == predicted[client]
    assert predicted == (3, 2)
