"""The ledger hands out every batch once, and lets in only whom it knows."""

import functools
import operator
import threading

import pytest
from addresses import free_address
from devices import create_logical_devices
from service_doubles import variables_of

from keras_het.asynchronous.parameter_service import Status
from keras_het.asynchronous.parameter_service.sample_ledger import (
    LeaderLedger,
    LedgerConnection,
    Presence,
    SampleLedger,
    ServiceLostError,
    Stage,
    TrainingFacts,
)
from keras_het.rpc.admission import Gate
from keras_het.rpc.channel import FunctionClient, LocalChannel
from keras_het.rpc.server import FunctionServer

GOOD = b"credential of the good"
CLIENTS, BATCHES = 4, 100


class Leader(LeaderLedger):
    """Tells at once what it is told."""

    def start_epoch(self, epoch, training):
        super().start_epoch(epoch, training)
        self.tell()

    def set_stage(self, stage):
        super().set_stage(stage)
        self.tell()

    def claim(self, epoch, count):
        return super().claim(epoch, count)[1:]


@pytest.fixture(scope="module")
def served():
    """A server with a ledger, and the ledger's variables as they are at first."""
    create_logical_devices()
    server = FunctionServer(free_address())
    variables = variables_of(SampleLedger(server, Gate(GOOD), CLIENTS))
    server.start()
    yield server, [(variable, variable.numpy()) for variable in variables]
    server.close()


@pytest.fixture
def service(served):
    """The server's address, the server, and the leader of a training that has begun."""
    server, new = served
    for variable, value in new:
        variable.assign(value)
    ledger = Leader(LocalChannel(server))
    ledger.start_epoch(0, TrainingFacts(BATCHES, 17))
    ledger.set_stage(Stage.RUNNING)
    return server.address, server, ledger


def test_a_claim_can_be_under_way(service):
    """Whoever asks does not wait; the answer is what `claim` gives."""
    address, _, ledger = service
    remote = connect(address)
    under_way = [remote.start_claim(0, 2), remote.start_claim(0)]
    found = [remote.answer_to(answer) for answer in under_way]
    assert sorted(batch for _, first, n in found for batch in range(first, first + n)) == [0, 1, 2]
    assert {status for status, *_ in found} == {Status.OK}
    assert ledger.claimed[1] == 3
    assert connect(address).answer_to(remote.start_claim(1))[0] == Status.OK
    with pytest.raises(PermissionError, match="refused"):
        stranger = connect(address, proof=b"stranger")
        stranger.answer_to(stranger.start_claim(0))


def connect(address, client=1, proof=GOOD, timeout=10):
    return LedgerConnection(FunctionClient(address, proof, timeout), client)


def test_every_batch_is_handed_out_once_to_simultaneous_clients(service):
    address, _, ledger = service
    taken = [[] for _ in range(CLIENTS)]

    def take(client):
        remote = connect(address, client)
        while True:
            status, first, count = remote.claim(0, 1 + client % 2)
            assert status == Status.OK
            if not count:
                return
            taken[client] += range(first, first + count)

    threads = [threading.Thread(target=take, args=(client,)) for client in range(1, CLIENTS)]
    for thread in threads:
        thread.start()
    while (claim := ledger.claim(0, 3))[1]:
        taken[0] += range(claim[0], claim[0] + claim[1])
    for thread in threads:
        thread.join(60)
    assert sorted(functools.reduce(operator.iadd, taken, [])) == list(range(BATCHES))
    assert ledger.claimed.tolist() == [len(numbers) for numbers in taken]


def test_the_end_of_an_epoch_and_the_next_one(service):
    address, _, ledger = service
    remote = connect(address)
    assert ledger.claim(0, BATCHES - 1) == (0, BATCHES - 1)
    assert remote.claim(0, 4) == (Status.OK, BATCHES - 1, 1)
    assert remote.claim(0) == (Status.OK, BATCHES, 0)
    assert remote.claim(1) == (Status.OK, 0, 1)
    assert remote.claim(2) == (Status.WAIT, 0, 0)
    ledger.start_epoch(1, TrainingFacts(BATCHES, 17))
    assert remote.claim(2) == (Status.OK, 0, 1)
    assert ledger.claim(1, 2) == (1, 2)


@pytest.mark.parametrize("stage", [Stage.STARTING, Stage.ENDING, Stage.CLOSED])
def test_nothing_is_handed_out_before_or_after_training(service, stage):
    address, _, ledger = service
    ledger.set_stage(stage)
    assert connect(address).claim(0) == (Status.WAIT, 0, 0)
    assert connect(address).report(Presence.WAITING).stage == stage


def test_reports(service):
    address, _, ledger = service
    one, two = connect(address, 1), connect(address, 2)
    facts = one.report(Presence.TRAINING, used=5)
    assert (facts.stage, facts.epoch, facts.training.num_batches, facts.training.fingerprint) == (
        Stage.RUNNING,
        0,
        BATCHES,
        17,
    )
    one.report(Presence.TRAINING, used=7)
    two.report(Presence.WAITING)
    ledger.add_used(100)
    ledger.tell_used()
    assert ledger.used.tolist() == [100, 12, 0, 0]
    assert ledger.present(Presence.TRAINING, 60) == [1]
    assert ledger.present(Presence.WAITING, 60) == [2]
    one.report(Presence.GONE)
    assert ledger.present(Presence.TRAINING, 60) == []
    assert ledger.present(Presence.WAITING, within_seconds=-1) == []  # nobody was heard of since


def test_paces_of_all(service):
    address, _, ledger = service
    one = connect(address, 1)
    paces, silence = one.pace((50.0, 8, 0.25, 0.1, 0.3, 2.0))
    assert paces.tolist() == [[0] * 6, [50, 8, 0.25, 0.1, 0.3, 2], [0] * 6, [0] * 6]
    assert silence[1] < 60 < silence[2]  # nobody heard of client 2
    connect(address, 2).report(Presence.TRAINING)
    paces, silence = ledger.pace((400.0, 16, 0.0, 0.0, 0.0, 0.0))
    assert paces[:2].tolist() == [[400, 16, 0, 0, 0, 0], [50, 8, 0.25, 0.1, 0.3, 2]]
    assert max(silence[:3]) < 60


@pytest.mark.parametrize(("client", "proof"), [(1, b"guessed"), (CLIENTS, GOOD), (-1, GOOD)])
def test_strangers_are_refused_and_change_nothing(service, client, proof):
    address, _, ledger = service
    stranger = connect(address, client, proof)
    with pytest.raises(PermissionError, match="refused this worker"):
        stranger.claim(0)
    with pytest.raises(PermissionError, match="refused this worker"):
        stranger.report(Presence.TRAINING, used=5)
    assert ledger.claim(0, 1) == (0, 1)
    assert ledger.used.sum() == 0
    assert ledger.present(Presence.TRAINING, 60) == []


def test_a_worker_of_the_next_training_is_not_refused_by_the_last_one(service):
    address, _, ledger = service
    of_another_rule = connect(address, 1, b"of another rule")
    ledger.set_stage(Stage.ENDING)
    with pytest.raises(PermissionError, match="refused this worker"):
        of_another_rule.report(Presence.GONE)
    ledger.set_stage(Stage.CLOSED)
    with pytest.raises(ServiceLostError, match=r"has ended.*CLOSED"):
        of_another_rule.report(Presence.TRAINING, used=5)
    assert ledger.used.sum() == 0 and ledger.present(Presence.TRAINING, 60) == []
    assert connect(address).report(Presence.WAITING).stage == Stage.CLOSED


class LosesAnswers:
    """Some requests arrive, and their answers do not."""

    num_lost = 0

    def ask(self, method, arguments, specs):
        values = super().ask(method, arguments, specs)
        if self.num_lost:
            self.num_lost -= 1
            raise ServiceLostError("lost")
        return values


class WorkerThatLoses(LosesAnswers, LedgerConnection):
    pass


class LeaderThatLoses(LosesAnswers, LeaderLedger):
    pass


def lose(num_lost, report):
    for _ in range(num_lost):
        with pytest.raises(ServiceLostError):
            report()


@pytest.mark.parametrize("num_lost", [1, 3])
def test_samples_of_a_report_whose_answer_was_lost_count_once(service, num_lost):
    address, _, ledger = service
    remote = WorkerThatLoses(FunctionClient(address, GOOD, 10), 1)
    remote.report(Presence.TRAINING, used=5)
    remote.num_lost = num_lost
    lose(num_lost, lambda: remote.report(Presence.TRAINING, used=7))
    remote.report(Presence.TRAINING, used=100)
    assert ledger.used.tolist() == [0, 5 + 7 * num_lost + 100, 0, 0]
    again = connect(address)  # another process of the same worker
    again.report(Presence.TRAINING, used=1000)
    assert ledger.used[1] == 1105 + 7 * num_lost


def test_samples_of_the_leader_count_once(service):
    address, _, ledger = service
    leader = LeaderThatLoses(FunctionClient(address, GOOD, 10))
    leader.add_used(5)
    leader.tell_used()
    leader.add_used(7)
    leader.num_lost = 2
    lose(2, leader.tell_used)
    assert ledger.used[0] == 12  # it came, and the leader does not know
    leader.add_used(100)
    leader.tell_used()
    assert ledger.used.tolist() == [112, 0, 0, 0] == leader.used.tolist()


def test_a_service_that_is_not_there(logical_devices):
    with pytest.raises(ServiceLostError, match="did not answer within 1 s"):
        connect(free_address(), timeout=1).report(Presence.TRAINING)


def test_no_batch_of_an_epoch_after_the_last(service):
    address, _, ledger = service
    ledger.start_epoch(1, TrainingFacts(BATCHES, 17, num_epochs=2))
    remote = connect(address)
    assert remote.claim(1)[2] == 1
    assert remote.claim(2) == (Status.OK, 0, 0)
    assert ledger.claim(2, 5) == (0, 0)
