"""Sums over workers: exact, in order, once; what is not due changes nothing."""

import copy
import itertools
import random as randoms
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from keras_het.exchange.message import Kind, Message
from keras_het.summation.machine import MOST_SLOTS, Sums

NUM_WORKERS, RUN, TIMEOUT = 3, 77, 30.0
EXTREMES = [np.nan, np.inf, -np.inf, 3.4e38, -3.4e38, 1e-37, 1e-44, -0.0]


@pytest.fixture
def sums():
    sums = Sums(NUM_WORKERS)
    sums.join(RUN)
    return sums


def contribute(sums, worker, step, values, slot=0, run=RUN):
    return sums.contribute(run, slot, worker, step, np.asarray(values, np.float32))


def result(future):
    return future.result(TIMEOUT).vectors[0]


def assert_sums_of_ones(sums, *steps):
    for step in steps:
        futures = [contribute(sums, worker, step, [1.0]) for worker in range(NUM_WORKERS)]
        assert {float(result(future)[0]) for future in futures} == {3.0}


def values_of(random, size):
    values = (random.normal(size=size) * 10.0 ** random.integers(-3, 4)).astype(np.float32)
    return np.where(random.random(size) < 0.1, random.choice(EXTREMES, size), values).astype("f4")


def test_sums_have_the_same_bits_in_every_order_of_arrival():
    random = np.random.default_rng(0)
    values = [values_of(random, 500) for _ in range(NUM_WORKERS)]
    with np.errstate(all="ignore"):
        expected = (values[0] + values[1]) + values[2]
    for order in itertools.permutations(range(NUM_WORKERS)):
        sums = Sums(NUM_WORKERS)
        sums.join(RUN)
        futures = [contribute(sums, worker, 1, values[worker]) for worker in order]
        assert {result(future).tobytes() for future in futures} == {expected.tobytes()}


def test_no_answer_is_one_of_an_earlier_step(sums):
    """Workers that each run ahead as far as they may, in separate threads."""
    num_slots, num_steps = 8, 50

    def run(worker, slot):
        return [
            float(result(contribute(sums, worker, step, [step * 10.0**worker], slot))[0])
            for step in range(1, num_steps + 1)
        ]

    with ThreadPoolExecutor(num_slots * NUM_WORKERS) as pool:
        places = itertools.product(range(NUM_WORKERS), range(num_slots))
        answers = [pool.submit(run, worker, slot) for worker, slot in places]
        for answer in answers:
            assert answer.result(TIMEOUT) == [111.0 * step for step in range(1, num_steps + 1)]


def test_a_repeated_contribution_counts_once(sums):
    futures = [contribute(sums, 0, 1, [1.0]) for _ in range(3)]
    futures += [contribute(sums, 0, 1, [7.0])]  # the first one counts
    futures += [contribute(sums, worker, 1, [10.0**worker]) for worker in (1, 2)]
    futures += [contribute(sums, 1, 1, [5.0])]  # also when the sum is there
    assert {float(result(future)[0]) for future in futures} == {111.0}
    # and when others are a step ahead
    contribute(sums, 0, 2, [1.0])
    assert result(contribute(sums, 1, 1, [5.0])) == [111.0]
    futures = [contribute(sums, worker, 2, [1.0]) for worker in (1, 2)]
    assert result(futures[0]) == [3.0]
    assert_sums_of_ones(sums, 3, 4)


def test_a_worker_that_does_not_wait_for_a_sum_is_refused(sums):
    first = [contribute(sums, worker, 1, [1.0]) for worker in (0, 1)]
    for step in (2, 3, 0, -1):  # the sum of step 1 is not there yet
        with pytest.raises(ValueError, match="another step's turn"):
            contribute(sums, 0, step, [50.0])
    assert result(contribute(sums, 2, 1, [1.0])) == [3.0]
    assert {float(result(future)[0]) for future in first} == {3.0}
    with pytest.raises(ValueError, match="another step's turn"):
        contribute(sums, 0, 3, [50.0])
    assert_sums_of_ones(sums, 2, 3)


@pytest.mark.parametrize("wrong", [[], [1.0], [1.0] * 5], ids=len)
def test_another_length_than_the_first_is_refused(sums, wrong):
    for step in (1, 2, 3):
        first = contribute(sums, 1, step, [1.0, 2.0])
        with pytest.raises(ValueError, match="Lengths differ"):
            contribute(sums, 0, step, wrong)
        others = [contribute(sums, worker, step, [1.0, 2.0]) for worker in (0, 2)]
        assert {tuple(result(future)) for future in (first, *others)} == {(3.0, 6.0)}


def test_a_new_run_starts_over_and_ends_what_waits(sums):
    lost = contribute(sums, 0, 1, [50.0])
    sums.join(RUN)  # it has begun
    assert not lost.done()
    sums.join(RUN + 1)
    with pytest.raises(ConnectionError, match="Another run has begun"):
        lost.result(TIMEOUT)
    with pytest.raises(ValueError, match=f"Another run is summed here. Received: {RUN}"):
        contribute(sums, 1, 1, [1.0])
    futures = [contribute(sums, worker, 1, [1.0], run=RUN + 1) for worker in range(NUM_WORKERS)]
    assert result(futures[0]) == [3.0]


def test_a_sum_that_a_new_run_overtakes_is_given_to_nobody(sums, monkeypatch):
    """All have contributed, and nobody has added up yet, when the next run begins."""
    futures = [contribute(sums, worker, 1, [1.0]) for worker in (0, 1)]

    def add(parts):
        sums.join(RUN + 1)
        return parts[0]

    monkeypatch.setattr("keras_het.summation.machine._add", add)
    futures.append(contribute(sums, 2, 1, [1.0]))
    for future in futures:
        with pytest.raises(ConnectionError, match="Another run has begun"):
            future.result(TIMEOUT)


def test_memory_is_given_back(sums):
    """Contributions when they are added up, a sum when all have contributed to the next one."""
    kept = []
    for step in (1, 2):
        values = [np.full(1000, 1.0, np.float32) for _ in range(NUM_WORKERS)]
        kept += [weakref.ref(each) for each in values]
        for worker, each in enumerate(values):
            total = sums.contribute(RUN, 0, worker, step, each)
        kept.append(weakref.ref(result(total)))
        del each, values, total
    assert [each() is None for each in kept] == [True] * 7 + [False]
    sums.join(RUN + 1)
    assert kept[-1]() is None


def state_of(sums):
    slots = {
        number: (
            list(slot.latest),
            {k: v.tobytes() for k, v in slot.parts.items()},
            dict(slot.sums),
        )
        for number, slot in sums._slots.items()
    }
    return sums._run, slots


def bad_requests(random, due):
    """Requests one or more of whose values are refused, from workers that are there or not."""
    wrong = {
        "run": (0, -RUN, RUN + 1, 2**63 - 1, -(2**63)),
        "slot": (-1, MOST_SLOTS, 2**63 - 1, -(2**63)),
        # the step before would be a repetition, which is answered
        "step": (0, due + 1, due + 2**61, -due, -(2**63)),
        "worker": (-1, NUM_WORKERS, 2**70),
    }
    for _ in range(160):
        chosen = random.sample(sorted(wrong), random.randrange(1, 4))
        good = {"run": RUN, "slot": random.randrange(4), "step": due, "worker": 1}
        run, slot, step, worker = (good | {n: random.choice(wrong[n]) for n in chosen}).values()
        vector = np.zeros(random.randrange(70), np.float32)
        yield worker, Message(Kind.CONTRIBUTION, (run, slot, step), (vector,))
        yield worker, Message(Kind.JOIN, (0,))
        yield 1, Message(random.choice([Kind.DONE, Kind.SUM, Kind.GROUP_SIZE]), (7,))


def test_bad_requests_change_nothing_and_sums_stay_right(sums):
    random, numbers = randoms.Random(0), np.random.default_rng(0)
    for step in range(1, 21):
        first = [contribute(sums, 0, step, np.ones(5), slot) for slot in range(4)]
        before = copy.copy(state_of(sums))
        for worker, request in bad_requests(random, step):
            with pytest.raises(ValueError):
                sums.handle(worker, request)
        assert state_of(sums) == before
        values = values_of(numbers, 5)
        for slot in range(4):
            futures = [contribute(sums, worker, step, values, slot) for worker in (1, 2)]
            with np.errstate(all="ignore"):
                expected = (np.ones(5, np.float32) + values) + values
            for future in (first[slot], *futures):
                np.testing.assert_array_equal(result(future), expected)
