"""Many partitions: few are under way at a time, and all of one size share their functions."""

import gc
import threading
import weakref

import numpy as np
import pytest
import tensorflow as tf
from service_doubles import connect, exchange_within, shared_service, start_service

from keras_het.asynchronous.parameter_service import NO_ANSWER, Partitions, Status, client
from keras_het.asynchronous.rules import Delta
from keras_het.rpc.channel import FunctionClient

PARTITIONS = Partitions(((20,),), partition_size=2)
COUNT, LIMIT = len(PARTITIONS.sizes), client.PARTITIONS_UNDER_WAY
VERSIONS = np.zeros(COUNT, np.int64)


def start():
    return shared_service(PARTITIONS, Delta(), num_clients=2)


def ramp():
    return [tf.range(1.0, 1 + size) + 10 * i for i, size in enumerate(PARTITIONS.sizes)]


class Recorder:
    """Notes when calls are made and answered; answers wait for `may_answer`."""

    def __init__(self, monkeypatch):
        self.under_way, self.most, self.timeouts = set(), 0, []
        self.may_answer = threading.Event()
        self.may_answer.set()
        original = FunctionClient.call

        def call(service, function, arguments, specs, timeout_seconds=None):
            answer = original(service, function, arguments, specs, timeout_seconds)
            self.timeouts.append(timeout_seconds)
            self.under_way.add(len(self.timeouts))
            self.most = max(self.most, len(self.under_way))
            return Recorded(self, len(self.timeouts), answer)

        monkeypatch.setattr(FunctionClient, "call", call)


class Recorded:
    def __init__(self, recorder, number, answer):
        self.recorder, self.number, self.answer = recorder, number, answer

    def is_ok(self):
        self.recorder.may_answer.wait(60)
        self.recorder.under_way.discard(self.number)
        return self.answer.is_ok()

    def __getattr__(self, name):
        return getattr(self.answer, name)


def test_few_partitions_are_under_way(logical_devices, monkeypatch):
    connection = connect(start())
    recorder = Recorder(monkeypatch)
    answer = connection.push(ramp(), VERSIONS, 1, ramp())
    assert set(answer.statuses.numpy()) == {Status.OK}
    assert recorder.most == LIMIT < COUNT == len(recorder.timeouts)
    connection.pull(ramp())
    connection.export()
    assert recorder.most == LIMIT and len(recorder.timeouts) == 3 * COUNT


def test_a_push_goes_on_beside_what_the_worker_does(logical_devices, monkeypatch):
    service = start()
    connection = connect(service)
    recorder = Recorder(monkeypatch)
    recorder.may_answer.clear()
    push = connection.start_push(ramp(), VERSIONS, 1, 1)  # returns though nothing is answered
    recorder.may_answer.set()
    push.wait()
    assert len(push.calls) == COUNT
    for part, change in zip(service.center_partitions(), ramp(), strict=True):
        np.testing.assert_array_equal(part, change)


def test_a_push_that_travels_keeps_its_client(logical_devices):
    """TensorFlow would crash while the answer is waited for."""
    service = start()
    client = connect(service)
    kept = weakref.ref(client)
    push = client.start_push(ramp(), VERSIONS, 1, 1)
    push.watch()
    del client
    gc.collect()
    assert kept() is push.client
    push.wait()


def operations_before(operation):
    """Names of all operations that have run when this one does."""
    found, waiting = set(), [operation]
    while waiting:
        this = waiting.pop()
        before = [*this.control_inputs, *(each.op for each in this.inputs)]
        waiting += [each for each in before if each.name not in found]
        found |= {each.name for each in before}
    return found


def test_few_partitions_are_under_way_in_a_function(logical_devices):
    connection = connect(start())

    @tf.function
    def exchange(changes):
        return connection.push(changes, VERSIONS, 1, changes).statuses

    assert set(exchange(ramp()).numpy()) == {Status.OK}
    operations = exchange.get_concrete_function(ramp()).graph.get_operations()
    calls = [op for op in operations if op.type == "RpcCall"]
    checks = {op.inputs[0].op.name: op.name for op in operations if op.type == "RpcCheckStatus"}
    assert len(calls) == COUNT
    for place, call in enumerate(calls):
        answered = [checks[c.name] in operations_before(call) for c in calls]
        assert not any(answered[max(0, place - LIMIT + 1) :])
        assert place < LIMIT or answered[place - LIMIT]


@pytest.mark.full
@pytest.mark.parametrize("in_function", [False, True])
def test_a_service_that_is_gone_is_waited_for_once(logical_devices, monkeypatch, in_function):
    service = start_service(PARTITIONS, Delta())
    connection = connect(service, timeout_seconds=0.5)
    service.close()
    recorder = Recorder(monkeypatch)

    def pull():
        statuses = connection.pull(ramp()).statuses
        return statuses, [tf.zeros([]) if t is None else t for t in recorder.timeouts]

    statuses, timeouts = tf.function(pull, autograph=False)() if in_function else pull()
    np.testing.assert_array_equal(statuses, NO_ANSWER)
    np.testing.assert_array_equal(timeouts[:LIMIT], 0)  # its own
    np.testing.assert_allclose(timeouts[LIMIT:], 0.001)


def test_all_partitions_share_their_functions(logical_devices):
    service = start()
    of_partitions = [name for name in service._server._methods if name != "hello"]
    assert sorted(of_partitions) == sorted(f"{name}_2" for name in service._served())
    connection = connect(service)
    for count in (1, 2):
        connection.push(ramp(), VERSIONS, 1, ramp())
        answer = connection.pull(ramp())
        for got, change in zip(answer.partitions, ramp(), strict=True):
            np.testing.assert_array_equal(got, count * change)
    local = exchange_within(service, 1, 1.0, ramp())
    for got, change in zip(local, ramp(), strict=True):
        np.testing.assert_array_equal(got, 3 * change)
    np.testing.assert_array_equal(service.versions(), 3)


class Counting(Delta):
    """Counts updates of each part in a variable that the service is not told of."""

    def __init__(self):
        super().__init__()
        self.counts = {}

    def create_slots(self, center):
        self.counts[center.ref()] = tf.Variable(0, trainable=False)
        return super().create_slots(center)

    def update(self, center, slots, change, meta):
        self.counts[center.ref()].assign_add(1)
        return super().update(center, slots, change, meta)


@pytest.mark.full
def test_a_rule_with_variables_of_its_own_has_functions_for_each_partition(logical_devices):
    rule = Counting()
    connection = connect(start_service(PARTITIONS, rule, num_clients=2))
    for _ in range(3):
        connection.push(ramp(), VERSIONS, 1, ramp())
    assert [int(count) for count in rule.counts.values()] == [3] * COUNT


def test_after_its_end_training_takes_no_push(logical_devices):
    service = start()
    connection = connect(service)
    assert set(connection.push(ramp(), VERSIONS, 1, ramp(), 1).statuses.numpy()) == {Status.OK}
    connection.close_training()
    again = connection.push(ramp(), VERSIONS, 1, ramp(), 1)
    assert set(again.statuses.numpy()) == {Status.REPEATED}  # whose answer might have been lost
    for sequence in (0, 2):
        late = connection.push(ramp(), VERSIONS, 1, ramp(), sequence)
        assert set(late.statuses.numpy()) == {Status.CLOSED}
        for left, change in zip(late.residuals, ramp(), strict=True):
            np.testing.assert_array_equal(left, change)
    for part, change in zip(connection.pull(ramp()).partitions, ramp(), strict=True):
        np.testing.assert_array_equal(part, change)
    np.testing.assert_array_equal(service.versions(), 1)
    assert connection.latest_sequence() == 1
