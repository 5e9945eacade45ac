"""An async worker's next batch, asked for one ahead."""

import pytest

from keras_het.asynchronous.parameter_service import Status
from keras_het.asynchronous.parameter_service.sample_ledger import EarlyClaim, ServiceLostError


class Ledger:
    """Hands out the batches of one epoch; an answer may be lost, or be to wait."""

    def __init__(self, *answers, first=0):
        self.next, self.answers, self.asked = first, list(answers), []

    def start_claim(self, epoch):
        self.asked.append(epoch)
        answer = self.answers.pop(0) if self.answers else Status.OK
        if answer == Status.OK:
            self.next += 1
        return answer, self.next - 1

    def answer_to(self, answer):
        status, first = answer
        if status is None:
            raise ServiceLostError("no answer")
        return status, first, int(status == Status.OK)

    def claim(self, epoch):
        return self.answer_to(self.start_claim(epoch))


def asked_early(*answers, first=0):
    ledger = Ledger(*answers, first=first)
    early = EarlyClaim(ledger)
    early.ask(0)
    return early, ledger


def test_a_batch_is_asked_for_once_and_taken_once():
    early, ledger = asked_early()
    for _ in range(2):
        early.ask(0)
    assert ledger.asked == [0]
    assert early.take(0, after=-1) == (Status.OK, 0, 1)
    assert ledger.asked == [0]
    assert early.take(0, after=0) == (Status.OK, 1, 1)  # was not asked for
    assert ledger.asked == [0, 0]


def test_a_batch_of_another_epoch_is_none_of_this_one():
    early, ledger = asked_early()
    early.take(1, after=-1)
    assert ledger.asked == [0, 1]


def test_who_was_told_to_wait_asks_again():
    early, _ = asked_early(Status.WAIT, Status.WAIT)
    assert early.take(0, after=-1)[0] == Status.WAIT
    assert early.take(0, after=-1) == (Status.OK, 0, 1)


def test_a_lost_answer_is_a_lost_service():
    early, _ = asked_early(None)
    with pytest.raises(ServiceLostError):
        early.take(0, after=-1)
    assert early.take(0, after=-1) == (Status.OK, 0, 1)


def test_what_was_lost_with_an_earlier_service_is_asked_for_again():
    early, _ = asked_early(None, Status.OK, None)
    early.service_lost()
    assert early.take(0, after=-1) == (Status.OK, 0, 1)
    early.ask(0)  # the doubt was about the first one only
    with pytest.raises(ServiceLostError):
        early.take(0, after=0)


def test_a_batch_that_the_worker_has_trained_on_alone_is_not_taken_again():
    early, _ = asked_early()
    early.service_lost()
    assert early.take(0, after=0) == (Status.OK, 1, 1)


def test_one_that_it_has_not_come_to_is():
    early, ledger = asked_early(first=5)
    early.service_lost()
    assert early.take(0, after=3) == (Status.OK, 5, 1)
    assert len(ledger.asked) == 1
