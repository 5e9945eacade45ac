"""A service that is yet to start, or lost: waited for, polled, and told that a worker is alive."""

import logging
import threading
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from participant_doubles import PARTITIONS, TRAINS_ALONE, Leader, Ledger, Worker
from service_doubles import SECONDS, Clock, Service, lose_answer
from services import wait_until

from keras_het.asynchronous.exchange import AsyncWorker, async_worker, connection
from keras_het.asynchronous.exchange.async_worker import report_alive
from keras_het.asynchronous.exchange.connection import Connection, connect
from keras_het.asynchronous.exchange.exchange_engine import NoCenterError, Repeating, ReturnWatch
from keras_het.asynchronous.parameter_service.client import (
    ServiceLostError,
    UnknownTrainingError,
)
from keras_het.asynchronous.parameter_service.sample_ledger import Stage
from keras_het.rules import Delta


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(connection, "time", found)
    return found


@pytest.mark.parametrize("starts", [9.0, 20.0, 200.0, 1e9])
def test_says_once_that_it_waits_and_ends_with_the_last_error(clock, caplog, starts):
    def make():
        if clock.now < starts:
            raise ConnectionError("Nobody answers at 10.0.0.5:5050.")
        return "connected"

    caplog.set_level(logging.WARNING, "keras_het")
    if starts == 1e9:
        with pytest.raises(ConnectionError, match="Nobody answers"):
            connect(make, 300.0, "Or it has ended.")
        assert 300.0 <= clock.now < 301.0
    else:
        assert connect(make, 300.0, "Or it has ended.") == "connected"
    assert len(caplog.messages) == (starts > 10)
    if caplog.messages:
        assert "for 10 s; waiting up to 300 s for it to start. Or it has ended. (" in caplog.text
        assert "Nobody answers at 10.0.0.5:5050." in caplog.text


@pytest.mark.parametrize(("refusals", "match"), [(3, None), (-1, "restarted, and has no center")])
def test_a_worker_joins_once_the_leader_has_brought_the_center(monkeypatch, refusals, match):
    """A part of the service was restarted before; -1: it never gets a center."""
    service = Service(PARTITIONS, Delta())
    worker = Worker(
        service, timeout_seconds=30.0, startup_timeout_seconds=60.0 if match is None else 0.2
    )
    service.parts[0].has_center = False
    center, met, closed = service.exchange(), [], []
    pull = center.pull

    def pull_and_note():
        try:
            return pull()
        except NoCenterError as error:
            met.append(error)
            if len(met) == refusals:
                service.set_center([3.0, 3.0])
            raise

    center.pull = pull_and_note
    opened = Connection(center, Ledger(), Ledger(), lambda: closed.append(True))
    monkeypatch.setattr(async_worker, "open_connection", lambda worker, client: opened)
    worker.vectors.weights.copies.clear()
    if match is None:
        worker._join()
        assert len(met) == refusals
    else:
        with pytest.raises(ConnectionError, match=match):
            worker._join()
    worker.leave()
    assert closed == [True]
    assert worker.vectors.weights.copies == ([] if match else ["write"])
    np.testing.assert_array_equal(worker.weights, 0 if match else 3)


@pytest.mark.parametrize(
    ("kind", "cause"), [(Worker, "no part"), (Worker, "no leader"), (Leader, "no part")]
)
def test_what_was_learned_alone_is_scaled_once_however_often_rejoining_fails(kind, cause):
    """The service answers, but for a part of the center; or it was restarted without weights."""
    service = Service(PARTITIONS, Delta(), num_workers=2)
    participant = kind(service, **TRAINS_ALONE)
    exchange = participant.engine.exchange
    push_again = exchange.transport.push_again
    participant.train(1.0)
    lose_answer(exchange)
    if cause == "no part":
        exchange.transport.push_again = lambda push, indices: None
    else:
        participant._ledger.stage = Stage.STARTING
    for count in range(1, 5):
        participant.train(1.0)
        assert participant.engine.is_lost
        np.testing.assert_array_equal(participant.weights, 1 + count)
        participant.wait_until_answered()
    exchange.transport.push_again = push_again
    if cause == "no leader":
        participant._ledger.stage = Stage.RUNNING
    participant.train()
    assert not participant.engine.is_lost
    participant.meet()
    # it sent 1; of the 4 that it moved alone, each of two workers keeps a half
    np.testing.assert_array_equal(participant.weights, 3)
    np.testing.assert_array_equal(service.center, 3)


@pytest.mark.parametrize("kind", [Worker, Leader])
def test_no_step_asks_a_service_that_is_away(kind):
    """A question to a silent one lasts for its whole time-out; a thread asks, after this test."""
    service = Service(PARTITIONS, Delta(), num_workers=2)
    participant = kind(service, **{**TRAINS_ALONE, "timeout_seconds": 3600.0})
    participant.train(1.0)
    lose_answer(participant.engine.exchange)
    participant.train()
    client, ledger = participant.engine.exchange.transport, getattr(participant, "_ledger", None)
    channels, client._channels, participant._ledger = client._channels, None, None
    for _ in range(3):
        participant.train()
        participant.meet()
        assert kind is Leader or participant._epoch_of_the_group() == 0
        assert participant.engine.is_lost
    client._channels, participant._ledger = channels, ledger
    participant.engine.watch._answered.set()
    participant.train()
    assert not participant.engine.is_lost
    participant.meet()
    np.testing.assert_array_equal(service.center, 1)
    participant.engine.watch.stop()


class Asked:
    """Raises the given errors, one for each question, and then answers."""

    def __init__(self, *errors):
        self.errors, self.threads = list(errors), []
        self.answers = threading.Event()
        self.answers.set()

    def __call__(self, *_):
        self.threads.append(threading.current_thread())
        assert self.answers.wait(60)
        if self.errors:
            raise self.errors.pop(0)

    def wait_for(self, number):
        wait_until(lambda: len(self.threads) >= number)


@pytest.mark.parametrize(
    ("errors", "questions"),
    [
        ((), 1),
        ((ServiceLostError("silent"), UnknownTrainingError("restarted")), 3),
        ((PermissionError("another secret"), ServiceLostError("silent")), 1),
    ],
)
def test_what_counts_as_an_answer(errors, questions):
    service = Asked(*errors)
    watch = ReturnWatch(service, 0.01)
    assert not watch.has_answered
    watch.start()
    wait_until(lambda: watch.has_answered)
    watch.stop()
    assert len(service.threads) == questions
    assert threading.current_thread() not in service.threads


def test_it_asks_once_at_a_time_and_no_more_after_its_end():
    service = Asked(*[ServiceLostError("silent")] * 1_000_000)
    watch = ReturnWatch(service, 0.0)
    watch.start()
    watch.start()
    service.wait_for(4)
    watch.stop()
    questions = len(service.threads)
    assert len(set(service.threads)) == 1
    watch.start()
    assert len(service.threads) == questions and not watch.has_answered


def test_pauses_grow_where_what_follows_the_answer_fails():
    watch = ReturnWatch(lambda: None, 1e-3)
    pauses = []
    for _ in range(9):
        pauses.append(watch._pause)
        watch.start()
        wait_until(lambda: watch.has_answered)
    assert pauses == [1e-3 * min(2**n / 4, 16) for n in range(9)]
    watch.attached()
    assert watch._pause == pauses[0]
    watch.stop()


def heartbeat_of(report):
    return Repeating(partial(report_alive, SimpleNamespace(report=report)), 0.0, "alive")


def test_a_worker_reports_again_after_a_report_that_was_lost():
    reports = Asked(ServiceLostError("silent"), ServiceLostError("silent"))
    heartbeat = heartbeat_of(reports)
    reports.wait_for(4)
    heartbeat.stop()


class LeavingWorker(AsyncWorker):
    """What of an async worker has to be ended."""

    def __init__(self, report):
        self._opened, self._heartbeat = ExitStack(), heartbeat_of(report)
        self._opened.callback(self._heartbeat.stop)


@pytest.mark.parametrize("asks", ["whether it is back", "that a worker is alive"])
def test_an_end_waits_for_no_question_and_hears_no_late_answer(asks):
    service = Asked()
    service.answers.clear()
    watch = ReturnWatch(service, 0.0)
    if asks == "whether it is back":
        watch.start()
        end, thread = watch.stop, watch._thread
    else:
        worker = LeavingWorker(service)
        end, thread = worker.leave, worker._heartbeat
    service.wait_for(1)
    ending = threading.Thread(target=end, daemon=True)
    ending.start()
    ending.join(SECONDS)
    has_ended = not ending.is_alive()
    service.answers.set()
    thread.join(SECONDS)
    assert has_ended and not thread.is_alive() and not watch.has_answered


@pytest.mark.parametrize("leader_saw", ["nothing", "a pull for evaluation", "the push"])
def test_a_push_counts_once_though_its_answer_is_lost_with_the_service(leader_saw):
    service = Service(PARTITIONS, Delta())
    leader, worker = service.exchange(0), service.exchange(1)
    for each in (leader, worker):
        each.attach()
    own = [values + 1 for values in worker.seen]
    pending = worker.send(own, 1)  # the service takes it; nobody receives the answer
    if leader_saw != "nothing":
        leader.pull()
    if leader_saw == "the push":
        leader.attach()
    service.hold(PARTITIONS, Delta())  # restarted: it knows neither center nor pushes
    leader.transport.restore(leader.seen, latest=leader.seen_pushes)
    worker.transport.push_again(pending, range(len(own)))
    np.testing.assert_array_equal(np.concatenate(worker.receive(own)), 1)
    np.testing.assert_array_equal(service.center, 1)
