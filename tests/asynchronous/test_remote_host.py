"""The leader's exchanges with a service elsewhere, which is lost and comes back."""

from contextlib import ExitStack
from types import SimpleNamespace

import keras
import numpy as np
import pytest
from participant_doubles import PARTITIONS, Leader, service_of
from service_doubles import Service, lose_answer, lost

from keras_het.asynchronous.exchange import center
from keras_het.asynchronous.exchange.center import Center
from keras_het.asynchronous.exchange.participant import HybridOptions
from keras_het.asynchronous.parameter_service.client import ServiceLostError
from keras_het.callbacks import BackupAndRestore
from keras_het.exchange.message import Kind
from keras_het.fit.resume import TrainingState
from keras_het.rules import AsyncSGD, Delta


def serve(rule=None, **options):
    return Service(PARTITIONS, rule or Delta(), num_workers=2, **options)


@pytest.fixture
def service():
    return serve()


def test_who_continues_alone_learns_what_is_lost_and_not_how_to(service, caplog):
    leader = Leader(service)
    leader.train()
    lose_answer(leader.engine.exchange)
    leader.train()
    assert "service at lost The sync group continues alone" in caplog.text
    assert "on_service_loss" not in caplog.text


def test_what_others_did_is_kept_when_the_next_exchange_is_lost(service):
    """An answer is taken, and the push that follows it in the same exchange has none."""
    leader, other = Leader(service), service.exchange(1)
    other.attach()
    leader.train(1.0)
    other.send([np.full(2, 8, np.float32)], 4)
    leader.train(2.0)  # takes its first answer, and sends 2
    send = leader.engine.exchange.send

    def send_in_vain(values, samples):
        pending = send(values, samples)
        lose_answer(leader.engine.exchange)
        return pending

    leader.engine.exchange.send = send_in_vain
    leader.train(4.0, wait=True)  # takes an answer with 8 of the other
    assert leader.engine.is_lost
    np.testing.assert_array_equal(leader.weights, 1 + 2 + 8 + 4)
    leader.engine.exchange.send = send
    leader.wait_until_answered()
    leader.meet()
    np.testing.assert_array_equal(leader.weights, 15)
    np.testing.assert_array_equal(service.center, 15)


def test_statistics_are_sent_once_where_the_weights_are_too_stale():
    service = service_of(Delta(), max_staleness=0)
    leader, other = Leader(service), service.exchange(1)
    other.attach()
    other.send([np.full(2, 8, np.float32)], 4)
    leader.train(1.0, wait=True)
    np.testing.assert_array_equal(service.center, 9)
    assert service.versions == [2, 1]


class Unreachable:
    """A channel to a process that was killed: every message waits for the whole time-out."""

    num_waits, timeout_seconds, most_under_way = 0, 1.0, 1

    def start(self, request):
        self.num_waits += 1
        return lost()


def test_a_service_that_was_killed_is_waited_for_once():
    """Also where moving statistics follow the weights."""
    leader, channel = Leader(service_of(Delta())), Unreachable()
    leader.engine.exchange.transport._channels = [channel]
    leader.train(1.0)
    assert leader.engine.is_lost and channel.num_waits == 1


def test_a_backup_without_a_service_keeps_the_state_of_the_one_before(tmp_path, monkeypatch):
    leader = Leader(serve(AsyncSGD(0.1, momentum=0.5)), timeout_seconds=3600.0)
    backup, channel = BackupAndRestore(str(tmp_path)), Unreachable()
    extended = SimpleNamespace(training_state=TrainingState(leader.exported))
    strategy = SimpleNamespace(extended=extended)
    monkeypatch.setattr(backup, "_strategy", lambda: strategy)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd")
    before, client = backup._service_state(), leader.engine.exchange.transport
    assert set(before) == {f"service/{name}" for name in client.export()}
    client._channels = [channel]
    for _ in range(2):  # the second time nobody is asked
        backup._folder.add(model, {"position": np.array("{}"), **before})
        found = backup._service_state()
        assert leader.engine.is_lost and channel.num_waits == 1
        np.testing.assert_equal(found, before)
    leader.engine.watch.stop()
    strategy.extended.training_state.export = None  # a training without a service
    assert backup._service_state() == {}


def test_a_backup_ends_a_training_that_must_not_continue_alone(service):
    leader = Leader(service, goes_on_without_service=False)
    leader.engine.exchange.transport._channels = [Unreachable()]
    with pytest.raises(ServiceLostError, match="parameter service at "):
        leader.exported()
    assert leader.engine.is_given_up


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

    def assert_brings_the_center(self):
        self.meet()
        assert not self.engine.is_lost and not self._awaits_center
        assert self.tries == 2
        np.testing.assert_array_equal(self._service.center, 2)


def test_the_center_is_brought_until_it_is_there(service):
    leader = LeaderOfRestarted(service, found=[["one:1"], []], tries=0)
    leader.train(2.0)
    lose_answer(leader.engine.exchange)
    for tries in (0, 1):
        leader.train()
        assert leader.engine.is_lost and leader.tries == leader._awaits_center == tries
    leader.assert_brings_the_center()


def test_a_service_that_is_lost_again_before_it_takes_the_training(service):
    leader = LeaderOfRestarted(service, found=[["one:1"]], tries=-1)
    leader.train(2.0)
    lose_answer(leader.engine.exchange)
    for _ in range(2):
        leader.train()
    assert leader.engine.is_lost and leader.tries == 0
    np.testing.assert_array_equal(leader.weights, 2)


def test_a_part_that_knows_this_training_and_has_no_center_gets_it(service):
    """It was restarted, and an offer of the time before it reached it after all."""
    leader = LeaderOfRestarted(service, found=[], tries=1)  # not found to be new, takes a center
    service.parts[0].has_center = False
    leader.train(2.0, wait=True)
    assert leader.engine.is_lost and leader._awaits_center
    leader.assert_brings_the_center()


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
def test_a_lost_service_learns_of_the_end_and_is_not_waited_for(service, state, seconds):
    """A message to a silent service lasts for its whole time-out."""
    leader, told = Leader(service, timeout_seconds=3600.0), []
    leader.engine.is_lost, leader.engine.is_given_up = state == "away", state == "given up"
    leader._addresses, leader._tasks = ["own:1", "first:1", "second:1"], ["first:1", "second:1"]
    leader._first, *leader._channels = (Farewell(told) for _ in range(4))
    leader.close()
    assert told == 2 * bool(seconds) * [(Kind.FINISH, seconds)]


def test_a_leader_that_fails_to_connect_leaves_no_channel_open(monkeypatch):
    told, options = [], HybridOptions(Delta(), startup_timeout_seconds=0.0)
    leader = SimpleNamespace(options=options, credential=b"", num_participants=2)

    def refuse(*arguments):
        raise PermissionError("another secret")

    monkeypatch.setattr(center, "RemoteChannel", lambda *arguments: Farewell(told))
    monkeypatch.setattr(center, "connect_vectors", refuse)
    monkeypatch.setattr(center, "spec_of", lambda *arguments: None)
    with pytest.raises(PermissionError), ExitStack() as opened:
        Center(opened, leader, ["one:1", "two:1"])
    assert told == 3 * ["closed"]
