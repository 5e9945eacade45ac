"""Rules behind a part of the service: its answers, turns and refusals."""

from concurrent.futures import Future

import keras
import numpy as np
import pytest
from rule_checks import SIZE, Center, run_in_threads, start_vector
from test_conformance import ASYNCHRONOUS, WORKERS, make

from keras_het.asynchronous.parameter_service.part import Answer, Part, Push
from keras_het.asynchronous.parameter_service.service import Status
from keras_het.asynchronous.rules import (
    ASHL,
    AsyncSGD,
    DelayCompensated,
    HogwildEASGD,
    RoundRobinEASGD,
    Signal,
)

TIMEOUT = 30.0
ZEROS, ONES = np.zeros(SIZE, np.float32), np.ones(SIZE, np.float32)
BAD = np.full(SIZE, np.nan, np.float32)


def part_of(rule, num_workers=3, start=ZEROS, **options):
    part = Part(SIZE, rule, num_workers, **options)
    assert part.set_center(start) == Status.OK
    return part


def push(part, worker, change=ZEROS, number=0, version=0, samples=1):
    answer = part.push(Push(worker, number, version, samples, change))
    return answer.result(TIMEOUT) if isinstance(answer, Future) and answer.done() else answer


def status(part, *args):
    """What a push is answered; None while it waits for its turn."""
    answer = push(part, *args)
    return answer.status if isinstance(answer, Answer) else None


def test_nobody_waits_for_a_worker_whose_pushes_are_refused():
    steps = {"steps": (8, 5, 3), "second_steps": (3, 2, 1)}
    rule = ASHL(data_shares=(0.5, 0.3, 0.2), loss_threshold=0.5, largest_lead=1, **steps)
    part = part_of(rule)
    part.signal(0, Signal.LOSS_REACHED)
    assert [status(part, 0), status(part, 1)] == [Status.OK, Status.OK]
    for _ in range(2):
        waiting = push(part, 0)
        assert isinstance(waiting, Future) and not waiting.done()
        assert status(part, 2, BAD) == Status.NOT_FINITE
        assert waiting.result(TIMEOUT).status == Status.OK
        assert status(part, 1) == Status.OK


def test_simultaneous_pushes_are_all_counted():
    # every push takes a step of 1 / (1 + iterations): only exact counting gives the harmonic sum
    schedule = keras.optimizers.schedules.InverseTimeDecay(1.0, 1, 1.0)
    part, each = part_of(AsyncSGD(optimizer=keras.optimizers.SGD(schedule)), 4), 20
    run_in_threads(lambda number: [push(part, number, ONES) for _ in range(each)], 4)
    assert part.version == 4 * each
    assert [int(slot) for slot in part.slots.values() if slot.dtype == np.int64] == [4 * each]
    harmonic = np.sum(1 / np.arange(1, 4 * each + 1))
    np.testing.assert_allclose(part.center, np.full(SIZE, -harmonic), rtol=1e-4)


@pytest.mark.parametrize("case", ASYNCHRONOUS)
def test_the_service_does_the_same(case):
    center = Center(make(case), start_vector())
    part = part_of(make(case), WORKERS, start_vector())
    for turn in range(2 * WORKERS):
        message = np.random.default_rng(turn).normal(size=SIZE).astype("float32")
        seen = max(0, turn - turn % WORKERS)
        expected = center.push(turn % WORKERS, 4 + turn, seen, message)
        answer = push(part, turn % WORKERS, message, 0, seen, 4 + turn)
        assert (answer.status, answer.version) == (Status.OK, turn + 1)
        np.testing.assert_array_equal(answer.values, expected)
    np.testing.assert_array_equal(part.center, center.values)


def test_a_worker_that_was_refused_as_too_stale_starts_from_what_it_got():
    part = part_of(DelayCompensated(0.1, 1.0, 2), 2, staleness_bound=1)
    version = push(part, 0, ONES).version
    for _ in range(3):
        push(part, 1, ONES, 0, part.version)
    refused = push(part, 0, ONES, 0, version)
    assert refused.status == Status.STALE
    answer = push(part, 0, ONES, 0, refused.version)
    np.testing.assert_allclose(answer.values, refused.values - 0.1, rtol=1e-5)


def test_simultaneous_pushes_without_a_lock():
    part = part_of(HogwildEASGD(0.1), 4)

    def work(number):
        for _ in range(50):
            answer = push(part, number, ONES)
            assert answer.status == Status.OK and 0 <= answer.values.min() <= 1.5

    run_in_threads(work, 4)
    assert 50 <= part.version <= 200
    # whatever was lost to races, 50 pushes of one worker alone leave 0.9 ** 50 = 0.5 %
    np.testing.assert_allclose(part.center, 1, atol=0.05)


def test_pushes_wait_for_their_turn():
    part, rounds = part_of(RoundRobinEASGD(3, 0.3)), 4

    def work(number):
        for count in range(1, rounds + 1):
            answer = part.push(Push(number, count, 0, 1, np.full(SIZE, number, np.float32)))
            if isinstance(answer, Future):
                answer = answer.result(TIMEOUT)
                assert answer.had_to_wait
            assert answer.status == Status.OK

    run_in_threads(work, 3)
    assert part.version == 3 * rounds
    expected = 0.0
    for turn in range(3 * rounds):
        expected += 0.3 * (turn % 3 - expected)
    np.testing.assert_allclose(part.center, np.full(SIZE, expected), rtol=1e-5)


@pytest.mark.parametrize("kind", ["no number", "too large", "too large with the center"])
def test_a_refused_push_passes_the_turn_on(kind):
    bad = ZEROS.copy()
    bad[:2] = {"no number": [np.nan, 0], "too large": 3e38}.get(kind, [3e38, 0])
    is_known_later = kind == "too large with the center"
    part = part_of(RoundRobinEASGD(3, 0.3), start=-bad if is_known_later else ZEROS)
    before = part.center
    if not is_known_later:
        assert status(part, 1, bad) == Status.NOT_FINITE
        assert status(part, 1) is None  # it was not its turn
    assert status(part, 0, bad) == Status.NOT_FINITE
    if is_known_later:
        assert part.version == 0 and part.center is before
        assert status(part, 1) == Status.OK
    assert [status(part, number) for number in (0, 2)] == [None, Status.OK]
    assert part.version == 3


def test_a_worker_that_has_left_does_not_come_back_with_a_refused_push():
    part = part_of(RoundRobinEASGD(3, 0.3))
    part.signal(1, Signal.LEAVE)
    for _ in range(2):
        found = [status(part, 0), status(part, 1, BAD), status(part, 2)]
        assert found == [Status.OK, Status.NOT_FINITE, Status.OK]


def test_a_refused_push_that_is_sent_again_passes_no_second_turn():
    part = part_of(RoundRobinEASGD(3, 0.3))
    assert status(part, 0, BAD, 1) == Status.NOT_FINITE
    assert [status(part, 1), status(part, 2)] == [Status.OK, Status.OK]
    assert status(part, 0, BAD, 1) == Status.NOT_FINITE
    assert status(part, 1) is None
    assert status(part, 0, ZEROS, 2) == Status.OK
    assert part.version == 4
