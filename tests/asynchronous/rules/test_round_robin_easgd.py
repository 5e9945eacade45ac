"""Original EASGD: in turns, which the center enforces."""

import numpy as np
import pytest
import tensorflow as tf
from rule_checks import (
    PARTITIONS,
    Center,
    ElasticEquations,
    clients_and_status,
    connect,
    follow,
    run_in_threads,
    start_vector,
)
from service_doubles import PROOF, shared_service

from keras_het.asynchronous.parameter_service import Status
from keras_het.asynchronous.rules import RoundRobinEASGD, Signal
from keras_het.rpc.channel import FunctionClient


def test_equations(logical_devices):
    start = start_vector()
    follow(RoundRobinEASGD(3, 0.3), ElasticEquations(start, 0.3), start, order=[0, 1, 2])


def test_a_push_out_of_turn_changes_nothing(logical_devices):
    center = Center(RoundRobinEASGD(3, 0.3), start_vector())
    other = start_vector(2)
    for pusher in (1, 2):
        assert center.push(pusher, 1, 0, other) is None
    np.testing.assert_array_equal(center.values, start_vector())
    assert center.push(0, 1, 0, other) is not None
    assert center.push(0, 1, 0, other) is None
    for pusher in (1, 2, 0, 1):
        assert center.push(pusher, 1, center.version, other) is not None
    assert center.version == 5


@pytest.fixture
def service(logical_devices):
    return shared_service(PARTITIONS, RoundRobinEASGD(3, 0.3))


def test_service_says_wait(service):
    zeros = [tf.zeros([size]) for size in PARTITIONS.sizes]
    ones = [tf.ones([size]) for size in PARTITIONS.sizes]
    clients = [connect(service, i) for i in range(3)]
    versions = tf.zeros([3], tf.int64)
    answer = clients[1].push(ones, versions, 1.0, zeros)
    assert set(answer.statuses.numpy()) == {Status.WAIT}
    assert set(service.versions()) == {0}
    for residual in answer.residuals:  # nothing of it was taken
        np.testing.assert_array_equal(residual, tf.ones_like(residual))
    assert set(clients[0].push(ones, versions, 1.0, zeros).statuses.numpy()) == {Status.OK}
    assert set(clients[1].push(ones, versions, 1.0, zeros).statuses.numpy()) == {Status.OK}
    np.testing.assert_allclose(service.center()[0], np.full(18, 1 - 0.7**2), rtol=1e-5)


def test_a_question_for_the_turn_changes_nothing_of_it(service):
    client = FunctionClient(service.address, PROOF, 20)

    def ask(number, version=0, client=client):
        arguments = [tf.constant(0), tf.constant(number), tf.constant(version, tf.int64)]
        return int(client.ask("turn_6", arguments, tf.TensorSpec([], tf.int32)))

    for _ in range(2):
        assert [ask(number) for number in range(3)] == [Status.OK, Status.WAIT, Status.WAIT]
    bad = [ask(-1), ask(3), ask(1, -1), ask(0, 0, FunctionClient(service.address, b"x" * 32, 20))]
    assert bad == [Status.REFUSED] * 4
    assert set(service.versions()) == {0}


def test_clients_that_poll_get_their_turns_in_order(service):
    taken, rounds = [], 4

    def work(number):
        client = connect(service, number)
        value = [tf.fill([size], float(number)) for size in PARTITIONS.sizes]
        versions = np.zeros(len(value), np.int64)
        for count in range(1, rounds + 1):
            waiting = True
            while waiting:
                answer = client.push(value, tf.constant(versions), 1.0, value, sequence=count)
                statuses = answer.statuses.numpy()
                assert set(statuses) <= {Status.OK, Status.WAIT, Status.REPEATED}
                versions = np.maximum(versions, answer.versions)
                waiting = (statuses == Status.WAIT).any()
            taken.append(number)

    run_in_threads(work, 3)
    assert sorted(taken) == sorted(list(range(3)) * rounds)
    assert set(service.versions()) == {3 * rounds}
    expected = 0.0
    for turn in range(3 * rounds):
        expected += 0.3 * (turn % 3 - expected)
    np.testing.assert_allclose(service.center()[0].numpy().flat[0], expected, rtol=1e-5)


def test_a_worker_that_was_given_up_gets_its_turns_again(service):
    clients, status = clients_and_status(service)
    clients[0].signal(Signal.LEAVE, 1)
    assert [status(0), status(2), status(0)] == [Status.OK] * 3  # it is passed over
    assert [status(1), status(2)] == [Status.WAIT, Status.OK]  # it is back: its turn comes
    assert [status(0), status(2), status(1), status(2)] == [
        Status.OK, Status.WAIT, Status.OK, Status.OK,
    ]  # fmt: skip


def test_the_turn_is_not_left_with_one_that_is_gone_when_another_returns(service):
    clients, status = clients_and_status(service)
    for number in range(3):
        clients[0].signal(Signal.LEAVE, number)
    assert [status(1), status(1)] == [Status.OK, Status.OK]
    assert [status(2), status(1), status(2)] == [Status.WAIT, Status.OK, Status.OK]


@pytest.mark.quick("too large")
@pytest.mark.parametrize("kind", ["no number", "too large", "too large with the center"])
def test_a_refused_push_passes_the_turn_on(service, kind):
    pushed = {"no number": [np.nan], "too large": [3e38, 3e38]}.get(kind, [3e38])
    bad = [tf.concat([pushed, tf.zeros([size - len(pushed)])], 0) for size in PARTITIONS.sizes]
    if kind == "too large with the center":
        service.set_partitions([-value for value in bad])
    before = service.center_partitions()
    _, status = clients_and_status(service)
    if kind != "too large with the center":  # that is found out in the turn only
        assert status(1, bad) == Status.NOT_FINITE
        assert status(1) == Status.WAIT  # it was not its turn
    assert status(0, bad) == Status.NOT_FINITE
    for now, then in zip(service.center_partitions(), before, strict=True):
        np.testing.assert_array_equal(now, then)
    assert set(service.versions()) == {0}
    assert [status(number) for number in (0, 1, 2, 0, 1)] == [
        Status.WAIT, Status.OK, Status.OK, Status.OK, Status.OK,
    ]  # fmt: skip


def test_a_worker_that_has_left_does_not_come_back_with_a_refused_push(service):
    clients, status = clients_and_status(service)
    clients[0].signal(Signal.LEAVE, 1)
    bad = [tf.fill([size], np.nan) for size in PARTITIONS.sizes]
    for _ in range(2):
        assert [status(0), status(1, bad), status(2)] == [
            Status.OK, Status.NOT_FINITE, Status.OK,
        ]  # fmt: skip


def test_a_refused_push_that_is_sent_again_passes_no_second_turn(service):
    zeros = [tf.zeros([size]) for size in PARTITIONS.sizes]
    bad = [tf.fill([size], np.nan) for size in PARTITIONS.sizes]
    _, status = clients_and_status(service)
    assert [status(0, bad, 1), status(1), status(2)] == [Status.NOT_FINITE, Status.OK, Status.OK]
    assert [status(0, bad, 1), status(1)] == [Status.NOT_FINITE, Status.WAIT]
    assert [status(0, zeros, 2), status(1)] == [Status.OK, Status.OK]
