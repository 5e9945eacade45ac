"""A service that is yet to start, or lost: waited for, polled, and told that a worker is alive."""

import logging
import threading
from types import SimpleNamespace

import pytest
from addresses import free_address
from service_doubles import PROOF, SECONDS, Clock

from keras_het.asynchronous.exchange import AsyncWorker, connection
from keras_het.asynchronous.exchange.async_worker import Heartbeat
from keras_het.asynchronous.exchange.connection import connect
from keras_het.asynchronous.exchange.exchange_engine import ReturnWatch
from keras_het.asynchronous.parameter_service.channel import (
    RemoteChannel,
    ServiceLostError,
    UnknownTrainingError,
)
from keras_het.exchange.message import Kind, Message


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(connection, "time", found)
    return found


def service_from(clock: Clock, seconds: float) -> object:
    def make() -> str:
        if clock.now < seconds:
            raise ConnectionError("Nobody answers at 10.0.0.5:5050.")
        return "connected"

    return make


@pytest.mark.parametrize(("starts", "sentences"), [(9.0, 0), (20.0, 1), (200.0, 1)])
def test_says_once_that_it_waits(
    clock: Clock, caplog: pytest.LogCaptureFixture, starts: float, sentences: int
) -> None:
    with caplog.at_level(logging.WARNING, "keras_het"):
        assert connect(service_from(clock, starts), 300.0, "Or it has ended.") == "connected"
    assert len(caplog.messages) == sentences
    if sentences:
        assert "for 10 s; waiting up to 300 s for it to start. Or it has ended. (" in caplog.text
        assert "Nobody answers at 10.0.0.5:5050." in caplog.text


def test_ends_with_the_last_error(clock: Clock) -> None:
    with pytest.raises(ConnectionError, match="Nobody answers"):
        connect(service_from(clock, 1e9), 300.0)
    assert 300.0 <= clock.now < 301.0


def test_no_service_is_an_error_that_says_so_in_time() -> None:
    channel = RemoteChannel(free_address(), PROOF, 0, timeout_seconds=0.3)
    with pytest.raises(ServiceLostError, match=r"did not answer within 0\.3 s.*on_service_loss"):
        connect(lambda: channel.ask(Message(Kind.LATEST)), 0.0)
    channel.close()


class Service:
    """Answers by raising what it is told, one after the other, then by nothing."""

    def __init__(self, *errors):
        self.errors, self.threads = list(errors), []
        self.enough = threading.Event()

    def __call__(self):
        self.threads.append(threading.current_thread())
        if len(self.threads) > 3:
            self.enough.set()
        if self.errors:
            raise self.errors.pop(0)


@pytest.mark.parametrize(
    ("errors", "questions"),
    [
        ((), 1),
        ((ServiceLostError("silent"), UnknownTrainingError("restarted")), 3),
        ((PermissionError("another secret"), ServiceLostError("silent")), 1),
    ],
)
def test_what_counts_as_an_answer(errors, questions):
    service = Service(*errors)
    watch = ReturnWatch(service, 0.01)
    assert not watch.has_answered
    watch.start()
    assert watch._answered.wait(SECONDS)
    watch.stop()
    assert len(service.threads) == questions
    assert threading.current_thread() not in service.threads


def test_it_asks_once_at_a_time_and_no_more_after_its_end():
    service = Service(*[ServiceLostError("silent")] * 1_000_000)
    watch = ReturnWatch(service, 0.0)
    watch.start()
    watch.start()
    assert service.enough.wait(SECONDS)
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
        assert watch._answered.wait(SECONDS)
    assert pauses == [1e-3 * min(2**n / 4, 16) for n in range(9)]
    watch.attached()
    assert watch._pause == pauses[0]
    watch.stop()


class SilentService(Service):
    """Leaves a question open until it is told to answer."""

    def __init__(self):
        super().__init__()
        self.answers = threading.Event()

    def __call__(self):
        super().__call__()
        self.enough.set()
        assert self.answers.wait(60)


def assert_ends_without_an_answer(end, asked, thread):
    ending = threading.Thread(target=end, daemon=True)
    ending.start()
    ending.join(SECONDS)
    has_ended = not ending.is_alive()
    asked.answers.set()
    thread.join(SECONDS)
    assert has_ended and not thread.is_alive()


def test_its_end_waits_for_no_question_and_hears_no_late_answer():
    service = SilentService()
    watch = ReturnWatch(service, 0.0)
    watch.start()
    assert service.enough.wait(SECONDS)
    assert_ends_without_an_answer(watch.stop, service, watch._thread)
    assert not watch.has_answered


class SilentLedger:
    """Leaves a report open until it is told to answer."""

    def __init__(self):
        self.asked, self.answers = threading.Event(), threading.Event()

    def report(self, presence):
        self.asked.set()
        assert self.answers.wait(60)


def test_a_worker_reports_again_after_a_report_that_was_lost():
    reports = Service(ServiceLostError("silent"), ServiceLostError("silent"))
    heartbeat = Heartbeat(SimpleNamespace(report=lambda presence: reports()), 0.0)
    assert reports.enough.wait(SECONDS)
    heartbeat.stop()


class LeavingWorker(AsyncWorker):
    """What of an async worker has to be ended."""

    def __init__(self, ledger):
        self._connection = None
        self._heartbeat = Heartbeat(ledger, 0.0)


def test_a_worker_that_leaves_does_not_wait_for_a_report_without_an_answer():
    ledger = SilentLedger()
    worker = LeavingWorker(ledger)
    thread = worker._heartbeat._thread
    assert ledger.asked.wait(SECONDS)
    assert_ends_without_an_answer(worker.leave, ledger, thread)
    assert worker._heartbeat is None
