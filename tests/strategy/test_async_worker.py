"""An async worker's exchanges, with a service in the same process."""

from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from addresses import free_address

from keras_het.strategy.hybrid import AsyncWorker
from keras_het.strategy.hybrid.participant import HybridOptions
from keras_het.strategy.hybrid.push_pace import PushPace
from keras_het.strategy.hybrid.service_connection import CenterClient
from keras_het.strategy.hybrid.statistics_averaging import StatisticsAveraging
from keras_het.strategy.parameter_service import (
    ParameterClient,
    ParameterService,
    Partitions,
    credential,
)
from keras_het.strategy.rules import AsyncSGD, Delta, serialize

PARTITIONS = Partitions(((2,),))
PROOF = credential(b"0123456789abcdef", "model")


class Values:
    """Weights of a model."""

    def __init__(self):
        self.values = [tf.zeros([2])]

    def read(self):
        return list(self.values)

    def write(self, values):
        self.values = list(values)

    def add(self, change):
        self.values = [own + change for own in self.values]


class Ledger:
    """Hears reports."""

    def report(self, presence, used):
        return SimpleNamespace(stage=0, epoch=0)


class LostCall:
    """A call whose answer never came."""

    def is_ok(self):
        return tf.constant(False)

    def get_error(self):
        return tf.constant(4), tf.constant("deadline exceeded")


class Worker(AsyncWorker):
    """An async worker without model and strategy."""

    def __init__(self, service, state_service, client=1, **options):
        self.rule = service._rule
        self.options = HybridOptions(self.rule, period=1, **options)
        self.vectors = SimpleNamespace(weights=Values(), state=Values())
        self._center = client_of(service, client, self.rule)
        self._state = client_of(state_service, client, state_service._rule)
        self._ledger, self._plan, self._mean_gradient = Ledger(), None, None
        self._pending = self._pending_state = self._planned_period = self._loss = None
        self._steps = self._samples = self._unreported = self._stage = self._worker = 0
        self._is_lost, self._next_try, self.num_clients = False, 0.0, 2
        self._pace = PushPace()
        self._start_from_center()

    def train(self, change):
        self.vectors.weights.add(change)
        self.steps_done(1, 4)


def start(rule, **options):
    service = ParameterService(free_address(), PARTITIONS, rule, PROOF, 3, **options)
    state = ParameterService(free_address(), PARTITIONS, StatisticsAveraging(0.5), PROOF, 3)
    for each in (service, state):
        each.start()
    return service, state


def client_of(service, client, rule):
    return CenterClient(ParameterClient(service.address, PARTITIONS, PROOF, client), rule)


def center_of(service):
    return np.array(service.center_partitions()[0])


def test_a_lost_answer_of_the_statistics_does_not_count_that_of_the_weights_twice(cpu_devices):
    service, state = start(Delta())
    worker = Worker(service, state, goes_on_without_service=True, timeout_seconds=0.0)
    other = Worker(service, state, client=2)
    other.train(10.0)
    other.meet_center()
    worker.train(1.0)
    worker._pending.push.wait()
    worker._pending_state.push.wait()
    worker._pending_state.push.calls[:] = [LostCall()]
    worker.train(2.0)  # the weights are answered, the statistics are not
    assert worker._is_lost
    np.testing.assert_array_equal(worker.vectors.weights.values[0], 13)
    worker.train(0.0)
    worker.meet_center()
    # of the 2 that it moved alone, each of two workers keeps a half
    np.testing.assert_array_equal(center_of(service), 12)
    np.testing.assert_array_equal(worker.vectors.weights.values[0], 12)


def test_a_variance_that_falls_while_the_answer_travels_is_not_negative(cpu_devices):
    """Of 1 it sent, half goes to a center of 0; when that comes, 0.01 is left."""
    service, state = start(Delta())
    worker = Worker(service, state)
    worker.vectors.state.write([tf.ones([2])])
    worker.train(1.0)
    worker.vectors.state.write([tf.constant([0.01, 0.01])])
    worker.train(1.0)
    worker._pending_state.push.wait()
    np.testing.assert_allclose(worker.vectors.state.values[0], 0.0)
    np.testing.assert_allclose(center_of(state), 0.5 * 0.5)
    assert serialize(state._rule)["class_name"] == "elastic_averaging", "to a service elsewhere"


@pytest.mark.parametrize("at_its_end", [False, True])
def test_a_change_too_stale_is_sent_until_it_is_taken(cpu_devices, at_its_end):
    service, state = start(Delta(), staleness_bound=0)
    worker, other = (Worker(service, state, client) for client in (1, 2))
    other.train(10.0)
    other.meet_center()
    worker.vectors.weights.add(1.0)
    worker._samples = 4
    if at_its_end:
        worker._meet(sends=True)
    else:
        worker.meet_center()
    np.testing.assert_array_equal(center_of(service), 11)
    np.testing.assert_array_equal(worker.vectors.weights.values[0], 11)


def test_gradients_that_were_summed_up_are_sent_at_the_end_only(cpu_devices):
    service, state = start(AsyncSGD(1.0))
    worker = Worker(service, state)
    taken = []

    def take():
        taken.append(1)
        return [tf.ones([2])]

    worker._mean_gradient = SimpleNamespace(take=take)
    worker._samples = 4  # of steps since the last exchange
    worker.meet_center()
    assert not taken
    worker._meet(sends=True)
    assert taken == [1]
    np.testing.assert_array_equal(center_of(service), -1)
    np.testing.assert_array_equal(worker.vectors.weights.values[0], -1)
    worker._meet(sends=True)  # nothing is left
    assert taken == [1]


def test_the_statistics_of_one_worker_alone_go_on(cpu_devices):
    service, _ = start(Delta())
    state = ParameterService(free_address(), PARTITIONS, StatisticsAveraging(1.0), PROOF, 3)
    state.start()
    worker = Worker(service, state)
    for _ in range(4):
        worker.vectors.state.add(1.0)
        worker.train(1.0)
    worker._pending_state.push.wait()
    np.testing.assert_array_equal(worker.vectors.state.values[0], 4)
    np.testing.assert_array_equal(center_of(state), 4)


def test_statistics_keep_what_was_learned_while_the_answer_travelled(cpu_devices):
    rule = StatisticsAveraging(0.5)
    sent, own, center = (tf.constant([value]) for value in (4.0, 5.0, 3.0))
    np.testing.assert_allclose(rule.receive(own, sent, center), 4.5)
