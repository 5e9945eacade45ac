"""The leader's exchanges with a service elsewhere, which is lost and comes back."""

import time
from types import SimpleNamespace

import numpy as np
import tensorflow as tf
from addresses import free_address, silent_address
from service_doubles import LostCall

from keras_het.asynchronous.exchange import connection
from keras_het.asynchronous.exchange.center import Center
from keras_het.asynchronous.exchange.connection import LeaderConnection
from keras_het.asynchronous.exchange.exchange_engine import ExchangeEngine, VectorExchange
from keras_het.asynchronous.exchange.participant import HybridOptions
from keras_het.asynchronous.parameter_service import (
    ParameterClient,
    ParameterService,
    Partitions,
    credential,
)
from keras_het.asynchronous.rules import Delta

PARTITIONS = Partitions(((2,),))
PROOF = credential(b"0123456789abcdef", "model")


class Leader(Center):
    """The leader of a group of one worker, beside one async worker; without model and strategy."""

    def __init__(self, service, seconds=0.0):
        rule = Delta()
        self._options = HybridOptions(rule, timeout_seconds=seconds, goes_on_without_service=True)
        self._leader = SimpleNamespace(num_participants=2)
        self._parts = SimpleNamespace(
            restarted=list, open_directory=lambda: None, awaits_center=False
        )
        self.ledger = SimpleNamespace(tell=lambda *arguments: None)
        connection = ParameterClient(service.address, PARTITIONS, PROOF, 0)
        self._taken_until, self._waits = 0, False
        self.engine = ExchangeEngine(
            VectorExchange(connection, rule),
            None,
            lambda: self._parts.restarted(),
            self._options,
            "The sync group",
            self._note_loss,
        )
        self.engine.attach()

    def lose(self):
        """Loses the service after a push."""
        (weights,) = self.exchange([tf.ones([2])], [], 4, push=True)
        self.engine.weights.pending.push.wait()
        self.engine.weights.pending.push.calls[:] = [LostCall()]
        return weights


def test_what_was_learned_alone_is_scaled_once_however_often_rejoining_fails(logical_devices):
    """All processes are there again, and a part of the center does not answer."""
    service = ParameterService(free_address(), PARTITIONS, Delta(), PROOF, 2)
    service.start()
    leader = Leader(service)
    connection = leader.engine.weights._transport
    push_again = connection.push_again
    connection.push_again = lambda push, indices: None
    weights = leader.lose()
    for count in range(1, 5):
        (weights,) = leader.exchange([weights + 1.0], [], 4, push=True)
        assert leader.engine.is_lost
        np.testing.assert_array_equal(weights, 1 + count)
        assert leader.engine.watch._answered.wait(30)  # the next exchange tries again
    connection.push_again = push_again
    (weights,) = leader.exchange([weights], [], 4, push=True, wait=True)
    # it sent 1; of the 4 that it moved alone, each of two workers keeps a half
    np.testing.assert_array_equal(weights, 3)
    np.testing.assert_array_equal(service.center_partitions()[0], 3)
    service.close()


class Parts(LeaderConnection):
    """A process that was restarted, which does not take the center at first."""

    def __init__(self, leader, service):
        self._leader, self._service = SimpleNamespace(options=leader._options), service
        self.weights, self.state = leader.engine.weights._transport, None
        self.awaits_center = False
        self._found, self.tries = [["one:1"], []], 0

    def restarted(self):
        return self._found.pop(0) if self._found else []

    def _offer(self, tasks, patience):
        assert len(tasks) == (self.tries == 0), "who serves already is not told again"

    def bring_center(self, saved=None):
        self.tries += 1
        if self.tries == 1:
            raise ConnectionError("did not take partition 0")
        self._service.set_partitions([tf.fill([2], 2.0)])

    def open_directory(self):
        pass


def test_the_center_is_brought_until_it_is_there(logical_devices):
    service = ParameterService(free_address(), PARTITIONS, Delta(), PROOF, 2)
    service.start()
    leader = Leader(service)
    leader._parts = parts = Parts(leader, service)
    leader.engine.watch = SimpleNamespace(has_answered=True, start=int, attached=int)
    weights = leader.lose() + 1.0
    for tries in (0, 1):
        (weights,) = leader.exchange([weights], [], 4, push=True)
        assert leader.engine.is_lost and (parts.tries, parts.awaits_center) == (tries, bool(tries))
    leader.exchange([weights], [], 4, push=True, wait=True)
    assert not leader.engine.is_lost and not parts.awaits_center
    assert parts.tries == 2
    np.testing.assert_array_equal(service.center_partitions()[0], 2)
    service.close()


class Question:
    """Asks whether the service is there, and tells while it is not answered."""

    def __init__(self, address, leader):
        self.is_open = False
        self._parts = object.__new__(LeaderConnection)
        self._parts.addresses, self._parts._leader = [address], leader
        self._parts._own = None

    def __call__(self):
        self.is_open = True
        try:
            return self._parts.restarted()
        finally:
            self.is_open = False


def test_the_group_goes_on_while_a_silent_service_is_asked(logical_devices):
    service = ParameterService(free_address(), PARTITIONS, Delta(), PROOF, 2)
    service.start()
    leader = Leader(service, seconds=2.0)
    weights, exchanges, deadline = leader.lose(), 0, time.monotonic() + 60
    with silent_address() as address:
        question = Question(address, SimpleNamespace(credential=PROOF, options=leader._options))
        leader._parts.restarted = question
        while exchanges < 20:
            assert time.monotonic() < deadline, f"{exchanges} exchanges while nothing answers"
            (weights,) = leader.exchange([weights], [], 4, push=True)
            assert leader.engine.is_lost
            exchanges += question.is_open
    leader._parts.restarted = list
    assert leader.engine.watch._answered.wait(60)
    leader.exchange([weights], [], 4, push=True, wait=True)
    assert not leader.engine.is_lost
    leader.engine.watch.stop()
    service.close()


def test_a_service_that_is_away_is_told_the_end_and_not_waited_for(logical_devices, monkeypatch):
    """A message to a silent service lasts for its whole time-out."""
    allowed = []

    class Client:
        def __init__(self, address, credential, timeout_seconds):
            self._message = (address, timeout_seconds)

        def call(self, *arguments):
            allowed.append(self._message)
            return LostCall()

        ask = call

    monkeypatch.setattr(connection, "FunctionClient", Client)
    service = ParameterService(free_address(), PARTITIONS, Delta(), PROOF, 2)
    service.start()
    for is_lost, seconds in ((False, 3600.0), (True, 1.0)):
        leader = Leader(service, seconds=3600.0)
        leader.engine.is_lost = is_lost
        leader._parts = object.__new__(LeaderConnection)
        leader._parts._tasks = ["first:1", "second:1"]
        leader._parts._leader = SimpleNamespace(credential=PROOF, options=leader._options)
        leader.close()
        assert allowed == [("first:1", seconds), ("second:1", seconds)]
        allowed.clear()
    service.close()


def test_a_part_that_knows_this_training_and_has_no_center_gets_it(logical_devices):
    """It was restarted, and an offer of the time before it reached it after all."""
    service = ParameterService(free_address(), PARTITIONS, Delta(), PROOF, 2)
    service.start()
    leader = Leader(service)
    leader._parts = parts = Parts(leader, service)
    parts._found, parts.tries = [], 1  # it is not found to be new, and takes a center
    leader.engine.watch = SimpleNamespace(has_answered=True, start=int, attached=int)
    (part,) = service._parts
    part.has_center.assign(False)
    (weights,) = leader.exchange([tf.fill([2], 2.0)], [], 4, push=True, wait=True)
    assert leader.engine.is_lost and parts.awaits_center
    leader.exchange([weights], [], 4, push=True, wait=True)
    assert not leader.engine.is_lost and not parts.awaits_center
    assert parts.tries == 2
    np.testing.assert_array_equal(service.center_partitions()[0], 2)
    service.close()
