"""The ledger hands out every batch once, also ahead of need, and takes only what can be."""

import collections
import itertools
import operator
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from random import Random

import numpy as np
import pytest
from service_doubles import serving

from keras_het.asynchronous.parameter_service.client import Channel, ServiceLostError
from keras_het.asynchronous.parameter_service.sample_ledger import (
    LARGEST_EPOCH,
    LeaderLedger,
    LedgerConnection,
    Presence,
    SampleLedger,
    Stage,
    TrainingFacts,
)
from keras_het.exchange.message import Kind, Message, Status, encode

CLIENTS, BATCHES = 4, 100
TRAINING = TrainingFacts(BATCHES, 17)
PACE = (50.0, 8, 0.25, 0.3, 2.0)


@pytest.fixture
def ledger():
    return SampleLedger(CLIENTS, clock=itertools.count().__next__)  # each look is a second later


@pytest.fixture
def leader(ledger):
    return lead(LeaderLedger(within(ledger, 0)))


def lead(leader, epoch=0, training=TRAINING, stage=Stage.RUNNING):
    leader.facts = training._replace(epoch=epoch, stage=stage)
    leader.tell()
    return leader


def within(ledger, participant, lost=()):
    """The channel of a participant on which as many answers are lost as `lost` is long."""

    def handle(request):
        answer = ledger.handle(participant, request)
        if lost:
            raise ConnectionError(lost.pop())
        return answer

    return Channel("this process", handle)


def connect(ledger, participant=1):
    return LedgerConnection(within(ledger, participant))


def test_claims_can_be_under_way(ledger, leader):
    """Whoever asks does not wait; the answer is what `claim` gives. Here over a network."""
    with serving(handlers=[ledger.handle]) as (channel_of, _):
        remote, other = (LedgerConnection(channel_of(number)) for number in (1, 2))
        remote_leader = LeaderLedger(channel_of(0))
        under_way = [remote.start_claim(0, 2), remote.start_claim(0)]
        found = [remote.answer_to(answer) for answer in under_way]
        assert found == [(Status.OK, 0, 2), (Status.OK, 2, 1)]
        assert other.claim(1) == (Status.OK, 0, 1)
        assert remote.report(Presence.TRAINING, used=5) == TRAINING._replace(stage=Stage.RUNNING)
        assert remote.pace(PACE)[0][1].tolist() == [*PACE]
        assert remote_leader.claimed.tolist() == leader.claimed.tolist() == [0, 3, 1, 0]
        assert remote_leader.used.tolist() == [0, 5, 0, 0]


def test_who_is_refused_changes_nothing(ledger, leader):
    before = str(vars(ledger))
    for method in (lambda it: it.claim(0), lambda it: it.report(Presence.TRAINING, used=5)):
        for unknown in (CLIENTS, -1):
            with pytest.raises(PermissionError, match=r"number differs.*no such.*Use the same"):
                method(connect(ledger, unknown))
    with pytest.raises(PermissionError, match="Only the leader"):
        LeaderLedger(within(ledger, 1)).tell()
    assert str(vars(ledger)) == before


class Interrupted(dict):
    """Other threads run between a look and what follows from it."""

    def get(self, *arguments):
        found = super().get(*arguments)
        time.sleep(1e-6)
        return found


def test_every_batch_is_handed_out_once_to_simultaneous_clients(ledger, leader):
    ledger._next = Interrupted()
    lead(leader, 0, TrainingFacts(5 * BATCHES))
    begins = threading.Barrier(CLIENTS)

    def take(client):
        own, taken = connect(ledger, client), []
        begins.wait(60)
        while (claim := own.claim(0, 1 + client % 2))[2]:
            taken += range(claim[1], claim[1] + claim[2])
        return taken

    with ThreadPoolExecutor(CLIENTS) as pool:
        taken = list(pool.map(take, range(CLIENTS)))
    assert sorted(itertools.chain(*taken)) == list(range(5 * BATCHES))
    assert leader.claimed.tolist() == [len(numbers) for numbers in taken]


def test_the_end_of_an_epoch_and_the_next_one(ledger, leader):
    own = connect(ledger)
    assert leader.claim(0, BATCHES - 1) == (Status.OK, 0, BATCHES - 1)
    assert not leader.is_handed_out
    assert own.claim(0, 4) == (Status.OK, BATCHES - 1, 1)
    assert own.claim(0) == (Status.OK, BATCHES, 0)
    assert leader.is_handed_out
    assert own.claim(1) == (Status.OK, 0, 1)
    assert own.claim(2) == (Status.WAIT, 0, 0)
    lead(leader, 1, TRAINING._replace(num_epochs=2))
    assert own.claim(2) == leader.claim(2, 5) == (Status.OK, 0, 0)  # there is no third one
    lead(leader, 1)
    assert own.claim(2) == (Status.OK, 0, 1)
    assert leader.claim(1, 2) == (Status.OK, 1, 2)
    for until, following in ((7, 7), (3, 8)):
        leader.tell(until)  # it has trained on these without the service
        assert own.claim(1) == (Status.OK, following, 1)


@pytest.mark.parametrize("stage", [Stage.STARTING, Stage.ENDING, Stage.CLOSED])
def test_nothing_is_handed_out_before_or_after_training(ledger, leader, stage):
    lead(leader, stage=stage)
    assert connect(ledger).claim(0) == (Status.WAIT, 0, 0)
    assert connect(ledger).report(Presence.WAITING).stage == stage


def test_reports(ledger, leader):
    one, two = connect(ledger, 1), connect(ledger, 2)
    facts = one.report(Presence.TRAINING, used=5)
    assert facts == TRAINING._replace(stage=Stage.RUNNING)
    one.report(Presence.TRAINING, used=7)
    two.report(Presence.WAITING)
    leader.add_used(100)
    leader.tell_used()
    assert leader.used.tolist() == [100, 12, 0, 0]
    assert leader.present(Presence.TRAINING, 60) == [1]
    assert leader.present(Presence.WAITING, 60) == [2]
    one.report(Presence.GONE)
    assert leader.present(Presence.TRAINING, 60) == []
    assert leader.present(Presence.WAITING, within_seconds=1) == []  # nobody was heard of since
    leader.is_kept = True
    two.report(Presence.TRAINING, used=3)
    assert leader.used.tolist() == [100, 12, 0, 0]


def test_paces_of_all(ledger, leader):
    paces, silence = connect(ledger, 1).pace(PACE)
    assert paces.tolist() == [[0] * 5, [*PACE], [0] * 5, [0] * 5]
    assert silence[1] < 60 < silence[2]  # nobody heard of client 2
    connect(ledger, 2).report(Presence.TRAINING)
    paces, silence = leader.pace((400.0, 16, 0.0, 0.0, 0.0))
    assert paces[:2].tolist() == [[400, 16, 0, 0, 0], [*PACE]]
    assert max(silence[:3]) < 60


def tell_used(connection, samples):
    if isinstance(connection, LeaderLedger):
        connection.add_used(samples)
        connection.tell_used()
    else:
        connection.report(Presence.TRAINING, samples)


@pytest.mark.parametrize("kind", [LeaderLedger, LedgerConnection])
@pytest.mark.parametrize("num_lost", [1, 3])
def test_samples_of_a_report_whose_answer_was_lost_count_once(ledger, leader, kind, num_lost):
    sender = int(kind is LedgerConnection)
    own = kind(within(ledger, sender, lost := []))
    tell_used(own, 5)
    lost += ["lost"] * num_lost
    for _ in range(num_lost):
        with pytest.raises(ServiceLostError):
            tell_used(own, 7)
    assert leader.used[sender] == 12  # it came, and its sender does not know
    tell_used(own, 100)
    tell_used(kind(within(ledger, sender)), 1000)  # another process of the same participant
    assert leader.used[sender] == leader.used.sum() == 1105 + 7 * num_lost


COUNT, EPOCH = range(2**63), range(LARGEST_EPOCH)
RIGHT = {
    Kind.CLAIM: (EPOCH, COUNT[1:]),
    Kind.REPORT: (COUNT, COUNT, range(3)),
    Kind.PACE: (COUNT[1:], COUNT[1:], *[COUNT] * 3),
    # number of the report, samples; facts, of which the second is a hash; batches taken
    Kind.LEAD: (
        *(COUNT, COUNT, COUNT, range(-(2**63), 2**63)),
        *(COUNT, COUNT, COUNT, range(-1, 4), EPOCH, COUNT),
    ),
    Kind.DONE: (),
}
"""What each number of a request may be."""


def random_request(random):
    """Return a sender, a request of any numbers, and whether it is right."""

    def number(allowed):
        if random.random() < 0.9:
            return allowed[random.choice([0, 1, -1])]
        return random.choice([-(2**63), -2, -1, 0, 5, 2**62, random.randrange(-(2**63), 2**63)])

    kind = random.choice(list(RIGHT))
    sender = random.choice([0, 0, 0, 0, 1, CLIENTS - 1, CLIENTS, -1])
    numbers = [number(allowed) for allowed in RIGHT[kind]]
    right = kind != Kind.DONE and sender in range(1 if kind == Kind.LEAD else CLIENTS)
    right = right and all(map(operator.contains, RIGHT[kind], numbers))
    if kind not in (Kind.PACE, Kind.LEAD):
        return sender, Message(kind, tuple(numbers)), right
    if random.random() < 0.1:
        right, numbers = False, random.choice([numbers[:-1], [*numbers, 1], numbers[:2]])
    plain = 2 if kind == Kind.LEAD else 0
    vector = np.array(numbers[plain:], np.int64 if plain else np.float64)
    if kind == Kind.PACE and random.random() < 0.1:
        right, vector[random.randrange(len(vector))] = False, random.choice([np.nan, np.inf, -0.5])
    return sender, Message(kind, tuple(numbers[:plain]), (vector,)), right


def test_bad_requests_change_nothing_and_good_ones_are_answered(ledger, leader):
    """Whatever is taken, the numbers of all answers fit into a message."""
    random, right = Random(3), collections.Counter()
    for _ in range(2000):
        sender, request, is_right = random_request(random)
        before = str(vars(ledger))
        right[is_right, request.kind] += 1
        if is_right:
            assert list(encode(ledger.handle(sender, request), b"key"))
        else:
            with pytest.raises((ValueError, PermissionError)):
                ledger.handle(sender, request)
            assert str(vars(ledger)) == before
    assert len(right) == 9 and min(right.values()) > 40
    lead(leader)  # none has kept the lock


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

    early = LedgerConnection(Channel("this process", handle))
    early.ask_ahead(0)
    return early, asked


def test_a_batch_is_asked_for_once_and_taken_once():
    early, asked = asked_early()
    for _ in range(2):
        early.ask_ahead(0)
    assert asked == [0]
    assert early.take(0, after=-1) == (Status.OK, 0, 1)
    assert asked == [0]
    assert early.take(0, after=0) == (Status.OK, 1, 1)  # was not asked for
    assert asked == [0, 0]
    early.ask_ahead(0)
    assert early.take(1, after=-1) == (Status.OK, 3, 1)  # one of another epoch is none of this
    assert asked == [0, 0, 0, 1]


def test_who_must_wait_asks_again():
    early, _ = asked_early(Status.WAIT, Status.WAIT)
    assert early.take(0, after=-1)[0] == Status.WAIT
    assert early.take(0, after=-1) == (Status.OK, 0, 1)


def test_what_was_lost_with_an_earlier_service_is_asked_for_again():
    early, _ = asked_early(None, Status.OK, None)
    early.service_lost()
    assert early.take(0, after=-1) == (Status.OK, 0, 1)
    early.ask_ahead(0)  # the doubt was about the first one only: this one is a lost service
    with pytest.raises(ServiceLostError):
        early.take(0, after=0)
    assert early.take(0, after=0) == (Status.OK, 1, 1)


@pytest.mark.parametrize(("after", "taken"), [(3, 5), (5, 6)])
def test_a_batch_that_the_worker_has_trained_on_alone_is_not_taken_again(after, taken):
    early, asked = asked_early(first=5)
    early.service_lost()
    assert early.take(0, after) == (Status.OK, taken, 1)
    assert len(asked) == taken - 4
