"""The leader's exchanges with a service elsewhere, which is lost and comes back."""

from contextlib import ExitStack
from types import SimpleNamespace

import numpy as np
import pytest
from service_doubles import SECONDS, Service, lose_answer, lost

from keras_het.asynchronous.exchange import center
from keras_het.asynchronous.exchange.center import Center
from keras_het.asynchronous.exchange.exchange_engine import ExchangeEngine
from keras_het.asynchronous.exchange.participant import HybridOptions
from keras_het.asynchronous.parameter_service import Partitions
from keras_het.asynchronous.parameter_service.channel import ServiceLostError
from keras_het.asynchronous.rules import Delta
from keras_het.exchange.message import Kind


@pytest.fixture
def service():
    return Service(Partitions(((2,),)), Delta(), num_workers=2)


class Leader(Center):
    """The leader of a group of one worker, beside one async worker; without model and strategy."""

    def __init__(self, service, seconds=0.0):
        rule = Delta()
        self._options = HybridOptions(rule, timeout_seconds=seconds, goes_on_without_service=True)
        self._leader = SimpleNamespace(num_participants=2)
        self._exchanges = [service.exchange(0)]
        self._taken_until, self._waits = 0, False
        self.engine = ExchangeEngine(
            self._exchanges,
            lambda: self._find_restarted(),
            self._options,
            "The sync group",
            self._note_loss,
        )
        self.engine.attach()

    def _find_restarted(self):
        return []

    def _open(self):
        pass

    def meet(self, weights, wait=False):
        values = [weights]
        self.exchange(values, 4, push=True, wait=wait)
        return values[0]

    def lose(self):
        """Loses the service after a push."""
        weights = self.meet([np.ones(2, np.float32)])
        lose_answer(self.engine.weights)
        return weights[0]


def test_what_was_learned_alone_is_scaled_once_however_often_rejoining_fails(service):
    """All processes are there again, and a part of the center does not answer."""
    leader = Leader(service)
    connection = leader.engine.weights.transport
    push_again = connection.push_again
    connection.push_again = lambda push, indices: None
    weights = leader.lose()
    for count in range(1, 5):
        (weights,) = leader.meet([weights + 1.0])
        assert leader.engine.is_lost
        np.testing.assert_array_equal(weights, 1 + count)
        assert leader.engine.watch._answered.wait(SECONDS)  # the next exchange tries again
    connection.push_again = push_again
    (weights,) = leader.meet([weights], wait=True)
    # it sent 1; of the 4 that it moved alone, each of two workers keeps a half
    np.testing.assert_array_equal(weights, 3)
    np.testing.assert_array_equal(service.center, 3)


def test_who_goes_on_alone_is_told_of_what_is_lost_and_not_how_to(service, caplog):
    leader = Leader(service)
    leader.meet([leader.lose()])
    assert "service at lost The sync group goes on alone" in caplog.text
    assert "on_service_loss" not in caplog.text


def test_what_others_did_is_kept_when_the_next_exchange_is_lost(service):
    """An answer is taken, and the push that follows it in the same exchange has none."""
    leader, other = Leader(service), service.exchange(1)
    other.adopt(other.pull())
    weights = leader.meet([np.ones(2, np.float32)])
    other.send([np.full(2, 8, np.float32)], 4)
    weights = leader.meet([weights[0] + 2.0])  # takes its first answer, and sends 2
    send = leader.engine.weights.send

    def send_in_vain(values, samples):
        pending = send(values, samples)
        lose_answer(leader.engine.weights)
        return pending

    leader.engine.weights.send = send_in_vain
    weights = leader.meet([weights[0] + 4.0], wait=True)  # takes an answer with 8 of the other
    assert leader.engine.is_lost
    np.testing.assert_array_equal(weights[0], 1 + 2 + 8 + 4)
    leader.engine.weights.send = send
    assert leader.engine.watch._answered.wait(SECONDS)
    (weights,) = leader.meet(weights, wait=True)
    np.testing.assert_array_equal(weights, 15)
    np.testing.assert_array_equal(service.center, 15)


def test_statistics_are_sent_once_where_the_weights_are_too_stale():
    service = Service(Partitions(((2,),)), Delta(), num_workers=2, staleness_bound=0)
    statistics = Service(Partitions(((2,),)), Delta(), num_workers=2)
    leader, other = Leader(service), service.exchange(1)
    leader.engine.exchanges.append(statistics.exchange(0))
    leader.engine.attach()
    other.adopt(other.pull())
    other.send([np.full(2, 8, np.float32)], 4)
    values = [[np.ones(2, np.float32)], [np.ones(2, np.float32)]]
    leader.exchange(values, 4, push=True, wait=True)
    np.testing.assert_array_equal(service.center, 9)
    assert (service.versions, statistics.versions) == ([2], [1])


class Unreachable:
    """A channel to a process that was killed: every message waits for the whole time-out."""

    num_waits, timeout_seconds = 0, 1.0

    def start(self, request):
        self.num_waits += 1
        return lost()


def test_a_service_that_was_killed_is_waited_for_once(service):
    """Also where moving statistics follow the weights."""
    leader, statistics = Leader(service), Service(Partitions(((2,),)), Delta(), num_workers=2)
    leader.engine.exchanges.append(statistics.exchange(0))
    leader.engine.attach()
    channel = Unreachable()
    for each in leader.engine.exchanges:
        each.transport._channels = [channel]
    leader.exchange([[np.ones(2, np.float32)], [np.ones(2, np.float32)]], 4, push=True)
    assert leader.engine.is_lost and channel.num_waits == 1


class LeaderOfRestarted(Leader):
    """Finds processes that were restarted, which do not take the center at first."""

    def __init__(self, service, found, tries):
        super().__init__(service)
        self._service, self._found, self.tries = service, found, tries
        self.engine.watch = SimpleNamespace(has_answered=True, start=int, attached=int)

    def _find_restarted(self):
        return self._found.pop(0) if self._found else []

    def _offer(self, tasks, patience):
        assert len(tasks) == (self.tries <= 0), "who serves already is not told again"
        if self.tries < 0:
            self.tries += 1
            raise ConnectionError("There is no parameter service.")

    def _bring_center(self):
        self.tries += 1
        if self.tries == 1:
            raise ServiceLostError("did not take part 0")
        self._service.set_center([2.0, 2.0])


def test_the_center_is_brought_until_it_is_there(service):
    leader = LeaderOfRestarted(service, found=[["one:1"], []], tries=0)
    weights = leader.lose() + 1.0
    for tries in (0, 1):
        (weights,) = leader.meet([weights])
        assert leader.engine.is_lost and (leader.tries, leader._awaits_center) == (
            tries,
            bool(tries),
        )
    leader.meet([weights], wait=True)
    assert not leader.engine.is_lost and not leader._awaits_center
    assert leader.tries == 2
    np.testing.assert_array_equal(service.center, 2)


def test_a_service_that_is_lost_again_before_it_takes_the_training(service):
    leader = LeaderOfRestarted(service, found=[["one:1"]], tries=-1)
    weights = leader.lose() + 1.0
    for _ in range(2):
        (weights,) = leader.meet([weights])
    assert leader.engine.is_lost and leader.tries == 0
    np.testing.assert_array_equal(weights, 2)


def test_no_exchange_asks_a_service_that_is_away(service):
    """A thread asks, after this test."""
    leader = Leader(service, seconds=3600.0)
    weights, client = leader.lose(), leader.engine.weights.transport
    (weights,) = leader.meet([weights])
    channels, client._channels = client._channels, None
    for _ in range(3):
        (weights,) = leader.meet([weights])
        assert leader.engine.is_lost
    client._channels = channels
    leader.engine.watch._answered.set()
    leader.meet([weights], wait=True)
    assert not leader.engine.is_lost
    leader.engine.watch.stop()


class Farewell:
    """A channel to a task that serves, whose answer to the end is lost."""

    def __init__(self, told):
        self.told, self.timeout_seconds = told, 3600.0

    def start(self, request):
        def result(seconds):
            assert self.timeout_seconds == seconds, "connecting may take as long"
            self.told.append((request.kind, seconds))
            raise ConnectionError("lost")

        return SimpleNamespace(result=result)

    def close(self):
        self.told.append("closed")


@pytest.mark.parametrize(("state", "seconds"), [("there", 3600.0), ("away", 1.0), ("given up", 0)])
def test_a_service_that_is_away_is_told_the_end_and_not_waited_for(service, state, seconds):
    """A message to a silent service lasts for its whole time-out."""
    leader, told = Leader(service, seconds=3600.0), []
    leader.engine.is_lost, leader.engine.is_given_up = state == "away", state == "given up"
    leader._addresses, leader._tasks = ["own:1", "first:1", "second:1"], ["first:1", "second:1"]
    leader._first, *leader._channels = (Farewell(told) for _ in range(4))
    leader.close()
    assert told == 2 * bool(seconds) * [(Kind.FINISH, seconds)]


def test_a_leader_that_fails_to_connect_leaves_no_channel_open(monkeypatch):
    told, options = [], HybridOptions(Delta(), connect_seconds=0.0)
    leader = SimpleNamespace(options=options, credential=b"", num_participants=2)

    def refuse(*arguments):
        raise PermissionError("another secret")

    monkeypatch.setattr(center, "RemoteChannel", lambda *arguments: Farewell(told))
    monkeypatch.setattr(center, "connect_vectors", refuse)
    monkeypatch.setattr(center, "spec_of", lambda *arguments: None)
    with pytest.raises(PermissionError), ExitStack() as opened:
        Center(opened, leader, ["one:1", "two:1"])
    assert told == 3 * ["closed"]


def test_a_part_that_knows_this_training_and_has_no_center_gets_it(service):
    """It was restarted, and an offer of the time before it reached it after all."""
    leader = LeaderOfRestarted(service, found=[], tries=1)  # not found to be new, takes a center
    service.parts[0].has_center = False
    (weights,) = leader.meet([np.full(2, 2, np.float32)], wait=True)
    assert leader.engine.is_lost and leader._awaits_center
    leader.meet([weights], wait=True)
    assert not leader.engine.is_lost and not leader._awaits_center
    assert leader.tries == 2
    np.testing.assert_array_equal(service.center, 2)
