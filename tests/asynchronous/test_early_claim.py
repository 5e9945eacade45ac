"""An async worker's next batch, asked for one ahead."""

import pytest

from keras_het.asynchronous.parameter_service.channel import Channel, ServiceLostError
from keras_het.asynchronous.parameter_service.ledger_client import EarlyClaim, LedgerConnection
from keras_het.exchange.message import Kind, Message
from keras_het.exchange.status import Status


def asked_early(*answers, first=0):
    """An early claim, and the epochs that it asks for; an answer may be lost, or be to wait."""
    asked, answers, batches = [], list(answers), iter(range(first, 100))

    def handle(request):
        asked.append(request.numbers[0])
        status = answers.pop(0) if answers else Status.OK
        if status is None:
            raise ConnectionError("no answer")
        grant = (next(batches), 1) if status == Status.OK else (0, 0)
        return Message(Kind.GRANT, (status, *grant))

    early = EarlyClaim(LedgerConnection(Channel("this process", handle)))
    early.ask(0)
    return early, asked


def test_a_batch_is_asked_for_once_and_taken_once():
    early, asked = asked_early()
    for _ in range(2):
        early.ask(0)
    assert asked == [0]
    assert early.take(0, after=-1) == (Status.OK, 0, 1)
    assert asked == [0]
    assert early.take(0, after=0) == (Status.OK, 1, 1)  # was not asked for
    assert asked == [0, 0]
    early.ask(0)
    assert early.take(1, after=-1) == (Status.OK, 3, 1)  # one of another epoch is none of this
    assert asked == [0, 0, 0, 1]


def test_who_was_told_to_wait_asks_again():
    early, _ = asked_early(Status.WAIT, Status.WAIT)
    assert early.take(0, after=-1)[0] == Status.WAIT
    assert early.take(0, after=-1) == (Status.OK, 0, 1)


def test_what_was_lost_with_an_earlier_service_is_asked_for_again():
    early, _ = asked_early(None, Status.OK, None)
    early.service_lost()
    assert early.take(0, after=-1) == (Status.OK, 0, 1)
    early.ask(0)  # the doubt was about the first one only: this one is a lost service
    with pytest.raises(ServiceLostError):
        early.take(0, after=0)
    assert early.take(0, after=0) == (Status.OK, 1, 1)


@pytest.mark.parametrize(("after", "taken"), [(3, 5), (5, 6)])
def test_a_batch_that_the_worker_has_trained_on_alone_is_not_taken_again(after, taken):
    early, asked = asked_early(first=5)
    early.service_lost()
    assert early.take(0, after) == (Status.OK, taken, 1)
    assert len(asked) == taken - 4
