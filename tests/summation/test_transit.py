"""A vector on its way: partitions in their turn, sums put together, and what ends it."""

from concurrent.futures import Future

import numpy as np
import pytest

from keras_het.exchange.message import Kind, Message
from keras_het.summation.placement import place_partitions
from keras_het.summation.transit import Route, Transit

TIMEOUT = 30.0
VALUES = np.arange(23, dtype=np.float32)


class Machine:
    def __init__(self, number, log):
        self.name, self._log = f"machine {number}", log

    def contribute(self, slot, step, values):
        future = Future()
        self._log.append((self, slot, step, values.copy(), future))
        return future


def answer(future, values):
    future.set_result(Message(Kind.SUM, (), (values,)))


@pytest.fixture
def placement():
    return place_partitions(23, [1.0] * 2, [1.0], 4, in_flight=2)


@pytest.fixture
def sent():
    return []


@pytest.fixture
def transit(sent):
    transit = Transit([Machine(number, sent) for number in range(3)])
    yield transit
    transit.close()


def settle(transit):
    done = Future()
    transit._events.put(lambda: done.set_result(None))
    done.result(TIMEOUT)


def route(placement):
    return Route(placement, tuple(range(100, 100 + len(placement.sizes))))


@pytest.mark.parametrize("last_first", [False, True])
def test_partitions_are_sent_behind_those_they_wait_for_and_no_others(
    transit, sent, placement, last_first
):
    total = transit.begin(route(placement), 7, VALUES)
    starts = np.cumsum([0, *placement.sizes])
    back = set()
    while len(back) < len(placement.sizes):
        settle(transit)
        slots = {slot - 100 for _, slot, *_ in sent}
        due = {n for n, waits in enumerate(placement.waits) if back >= set(waits)}
        assert slots == due
        number = (max if last_first else min)(due - back)
        ((machine, _, step, values, future),) = (each for each in sent if each[1] == 100 + number)
        assert (machine.name, step) == (f"machine {placement.owners[number]}", 7)
        np.testing.assert_array_equal(values, VALUES[starts[number] : starts[number + 1]])
        assert not total.done()
        answer(future, 3 * values)
        back.add(number)
    np.testing.assert_array_equal(total.result(TIMEOUT), 3 * VALUES)
    assert any(placement.waits)


def test_vectors_do_not_wait_for_each_other(transit, sent, placement):
    first, second = (transit.begin(route(placement), step, VALUES) for step in (1, 2))
    settle(transit)
    done = set()
    while len(done) < len(placement.sizes):
        for _, slot, step, values, future in list(sent):
            if step == 2 and slot not in done:
                done.add(slot)
                answer(future, values)
        settle(transit)
    np.testing.assert_array_equal(second.result(TIMEOUT), VALUES)
    assert not first.done()


@pytest.mark.parametrize(
    ("error", "kind", "match"),
    [
        (ConnectionError("it has gone"), ConnectionError, "machine 0: it has gone"),
        (MemoryError("too much"), ConnectionError, "machine 0: too much"),
        (ValueError("another step"), ValueError, "service of machine 0 refused this step"),
    ],
)
def test_an_error_names_the_machine(transit, sent, placement, error, kind, match):
    total = transit.begin(route(placement), 1, VALUES)
    settle(transit)
    *_, future = next(each for each in sent if each[0].name == "machine 0")
    future.set_exception(error)
    with pytest.raises(kind, match=match):
        total.result(TIMEOUT)
    count = len(sent)
    for _, _, _, values, other in sent:
        if not other.done():
            answer(other, values)
    settle(transit)
    assert len(sent) == count  # nothing more is sent


def test_a_loss_ends_what_is_under_way_and_what_is_begun_later(transit, placement):
    first = transit.begin(route(placement), 1, VALUES)
    transit.fail(ConnectionError("A process is lost."))
    for total in (first, transit.begin(route(placement), 2, VALUES)):
        with pytest.raises(ConnectionError, match="is lost"):
            total.result(TIMEOUT)


def test_a_process_that_ends_does_not_wait(transit, placement):
    total = transit.begin(route(placement), 1, VALUES)
    transit.close()
    with pytest.raises(ConnectionError, match="The process ends"):
        total.result(TIMEOUT)
