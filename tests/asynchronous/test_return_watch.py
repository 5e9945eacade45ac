"""A lost service is asked from beside the training until it answers."""

import threading

import pytest

from keras_het.asynchronous.exchange.exchange_engine import ReturnWatch
from keras_het.asynchronous.parameter_service.sample_ledger import ServiceLostError


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
        ((ServiceLostError("silent"), ConnectionError("refused")), 3),
        ((PermissionError("another secret"), ServiceLostError("silent")), 1),
    ],
)
def test_what_counts_as_an_answer(errors, questions):
    service = Service(*errors)
    watch = ReturnWatch(service, 0.01)
    assert not watch.has_answered
    watch.start()
    assert watch._answered.wait(30)
    watch.stop()
    assert len(service.threads) == questions
    assert threading.current_thread() not in service.threads


def test_it_asks_once_at_a_time_and_no_more_after_its_end():
    service = Service(*[ServiceLostError("silent")] * 1_000_000)
    watch = ReturnWatch(service, 0.0)
    watch.start()
    watch.start()
    assert service.enough.wait(30)
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
        assert watch._answered.wait(30)
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


def test_its_end_waits_for_no_question_and_hears_no_late_answer():
    service = SilentService()
    watch = ReturnWatch(service, 0.0)
    watch.start()
    assert service.enough.wait(30)
    end = threading.Thread(target=watch.stop, daemon=True)
    end.start()
    end.join(30)
    has_ended = not end.is_alive()
    service.answers.set()
    watch._thread.join(30)
    assert has_ended and not watch._thread.is_alive()
    assert not watch.has_answered
