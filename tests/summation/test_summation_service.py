"""Sums over workers: exact, in order, once; what is not due changes nothing."""

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_het.launch.local.free_ports import ReservedPorts
from keras_het.rpc.admission import Status, credential
from keras_het.summation.group import SummationClient
from keras_het.summation.service import SlotTable, SummationService, summation_credential

PROOF = credential(b"a secret of these tests", "summation")
NUM_WORKERS = 3
NUM_SLOTS = 24
RUN = 77
TIMEOUT = 60.0


@pytest.fixture(scope="module")
def service():
    # As tests/conftest.py has them, which comes later than this fixture.
    cpu = tf.config.list_physical_devices("CPU")[0]
    logical = [tf.config.LogicalDeviceConfiguration()] * 4
    tf.config.set_logical_device_configuration(cpu, logical)
    with ReservedPorts(1) as ports:
        ports.release()
        service = SummationService(ports.addresses[0], NUM_WORKERS, PROOF, NUM_SLOTS)
        service.start()
        yield service
        service.close()


def client_of(service, worker, run=RUN, proof=PROOF, timeout=TIMEOUT):
    is_lost = tf.Variable(False)
    client = SummationClient("worker 0", service.address, proof, worker, run, is_lost, timeout)
    client.mark_lost = lambda: is_lost.assign(True)
    return client


@pytest.fixture
def clients(service):
    """Of a run of their own each time: nothing is left of what a test did before."""
    run = int(np.random.default_rng().integers(1, 2**62))
    clients = [client_of(service, worker, run) for worker in range(NUM_WORKERS)]
    for client in clients:
        client.join(TIMEOUT)
    return clients


@pytest.fixture
def pool():
    with ThreadPoolExecutor(64) as pool:
        yield pool


def exchange(client, slot, step, values):
    status, total = client.exchange(
        tf.constant(slot), tf.constant(step, tf.int64), tf.constant(values, tf.float32)
    )
    return int(status), total.numpy()


def assert_sums_of_ones(clients, pool, *steps):
    """Each worker contributes 1 to these steps, and gets the number of workers."""
    for step in steps:
        answers = [pool.submit(exchange, client, 0, step, [1.0]) for client in clients]
        assert {answer.result(TIMEOUT)[1][0] for answer in answers} == {3.0}


def wait_for_count(service, slot, steps):
    deadline = time.monotonic() + TIMEOUT
    while service._table._latest[slot].numpy().tolist() != steps:
        assert time.monotonic() < deadline
        threading.Event().wait(0.005)


def test_sums_are_those_of_the_workers_in_their_order(clients, pool):
    random = np.random.default_rng(0)
    sizes = {0: 1, 1: 1000, 2: 33, NUM_SLOTS - 1: 70_000}
    for step in range(1, 6):
        values = {
            slot: random.normal(size=(NUM_WORKERS, size)).astype("float32") * 10.0**step
            for slot, size in sizes.items()
        }
        # In another order in each step.
        order = random.permutation([(w, slot) for w in range(NUM_WORKERS) for slot in sizes])
        answers = [
            (slot, pool.submit(exchange, clients[w], slot, step, values[slot][w]))
            for w, slot in order.tolist()
        ]
        for slot, answer in answers:
            status, total = answer.result(TIMEOUT)
            assert status == Status.OK
            expected = (values[slot][0] + values[slot][1]) + values[slot][2]
            np.testing.assert_array_equal(total, expected)


def test_no_answer_is_one_of_an_earlier_step(clients, pool):
    """Workers that each run ahead as far as they may; steps follow each other at once."""
    num_slots, num_steps = 8, 20

    def run(worker, slot):
        return [
            float(exchange(clients[worker], slot, step, [step * 10.0**worker])[1][0])
            for step in range(1, num_steps + 1)
        ]

    answers = [
        pool.submit(run, worker, slot) for slot in range(num_slots) for worker in range(NUM_WORKERS)
    ]
    for answer in answers:
        assert answer.result(TIMEOUT) == [111.0 * step for step in range(1, num_steps + 1)]


@pytest.mark.full
def test_many_may_wait_at_the_same_time(clients, pool):
    waiting = [
        pool.submit(exchange, clients[worker], slot, 1, [float(worker)])
        for worker in (0, 1)
        for slot in range(NUM_SLOTS)
    ]
    for slot in range(NUM_SLOTS):
        assert exchange(clients[2], slot, 1, [2.0]) == (Status.OK, [3.0])
    assert all(answer.result(TIMEOUT) == (Status.OK, [3.0]) for answer in waiting)


def test_a_call_that_is_repeated_counts_once(clients, pool):
    first = [pool.submit(exchange, clients[0], 0, 1, [1.0]) for _ in range(4)]
    others = [pool.submit(exchange, clients[w], 0, 1, [10.0**w]) for w in (1, 2)]
    assert {answer.result(TIMEOUT)[1][0] for answer in first + others} == {111.0}
    assert exchange(clients[1], 0, 1, [5.0]) == (Status.OK, [111.0])
    assert_sums_of_ones(clients, pool, 2, 3, 4)


def test_a_worker_that_does_not_wait_for_a_sum_is_refused(service, clients, pool):
    waiting = pool.submit(exchange, clients[0], 0, 1, [1.0])
    others = pool.submit(exchange, clients[1], 0, 1, [1.0])
    wait_for_count(service, 0, [1, 1, 0])
    for step in (2, 3):  # the sum of step 1 is not there yet
        assert exchange(clients[0], 0, step, [50.0])[0] == Status.REFUSED
    answers = [waiting, others, pool.submit(exchange, clients[2], 0, 1, [1.0])]
    assert {answer.result(TIMEOUT)[1][0] for answer in answers} == {3.0}
    assert_sums_of_ones(clients, pool, 2, 3, 4)


@pytest.mark.parametrize("wrong", [[], [1.0], [1.0] * 5], ids=len)
def test_another_length_than_the_first_is_refused(service, clients, pool, wrong):
    for step in (1, 2, 3):
        first = pool.submit(exchange, clients[1], 0, step, [1.0, 2.0])
        wait_for_count(service, 0, [step - 1, step, step - 1])
        assert exchange(clients[0], 0, step, wrong)[0] == Status.REFUSED
        answers = [pool.submit(exchange, clients[w], 0, step, [1.0, 2.0]) for w in (0, 2)]
        for answer in [first, *answers]:
            assert answer.result(TIMEOUT)[1].tolist() == [3.0, 6.0]


def test_a_stranger_does_not_join(service):
    with pytest.raises(PermissionError, match="its shared secret or its TF_CONFIG"):
        client_of(service, 0, RUN, b"\0" * 32).join(TIMEOUT)


def test_a_new_run_starts_over_while_calls_of_the_last_one_still_wait(service, clients, pool):
    lost = pool.submit(exchange, clients[0], 0, 1, [50.0])
    fresh = [client_of(service, worker, RUN + 5) for worker in range(NUM_WORKERS)]
    for client in fresh:
        client.join(TIMEOUT)
    assert_sums_of_ones(fresh, pool, 1, 2, 3)
    assert exchange(clients[1], 0, 1, [1.0])[0] == Status.REFUSED
    lost.result(TIMEOUT)


def test_a_contribution_that_a_new_run_overtakes_counts_for_none(logical_devices):
    """It was taken, and is not in its place yet, when the next run begins."""
    table = SlotTable(num_workers=1, num_slots=1)
    number, slot, worker = tf.TensorSpec([], tf.int64), tf.constant(0), tf.constant(0)
    step, place, size = tf.constant(1, tf.int64), tf.constant(1), tf.constant(3)
    join = tf.function(table.join, input_signature=[number])

    @tf.function(input_signature=[number])
    def take(run):
        return table._begin(run, slot, worker, step, place, size)[0]

    @tf.function(input_signature=[number])
    def count(run):
        return table._count(run, slot, worker, step)

    join(1)
    assert take(1)
    join(2)
    assert not count(1)
    assert table._latest.numpy().tolist() == [[0]]
    assert take(2) and count(2)
    assert table._latest.numpy().tolist() == [[1]]


def test_a_slow_worker_is_waited_for_beyond_the_time_out(service, clients, pool):
    run = clients[0]._run
    hasty = client_of(service, 0, run, timeout=0.2)
    waiting = pool.submit(exchange, hasty, 0, 1, [1.0])
    with pytest.raises(TimeoutError):
        waiting.result(1.5)
    answers = [pool.submit(exchange, clients[w], 0, 1, [1.0]) for w in (1, 2)]
    assert {answer.result(TIMEOUT)[1][0] for answer in [waiting, *answers]} == {3.0}


def test_waiting_ends_when_somebody_is_lost(service, clients, pool):
    hasty = client_of(service, 0, clients[0]._run, timeout=0.2)
    waiting = pool.submit(exchange, hasty, 0, 1, [1.0])
    hasty.mark_lost()
    with pytest.raises(tf.errors.DeadlineExceededError):
        waiting.result(TIMEOUT)


def test_contributions_of_this_process_need_no_message(service, clients, pool):
    def local():
        run, worker = tf.constant(clients[0]._run, tf.int64), tf.constant(0)
        step = tf.constant(1, tf.int64)
        status, total = service.exchange_locally(run, tf.constant(0), worker, step, tf.ones([2]))
        return int(status), total.numpy().tolist()

    answers = [pool.submit(exchange, clients[w], 0, 1, [1.0, 2.0]) for w in (1, 2)]
    assert local() == (Status.OK, [3.0, 5.0])
    assert [answer.result(TIMEOUT)[1].tolist() for answer in answers] == [[3.0, 5.0]] * 2


@pytest.mark.full
def test_clearing_tensorflows_caches_does_not_harm(clients, pool):
    keras.backend.clear_session()
    tf.constant(1.0) + 1.0
    assert_sums_of_ones(clients, pool, 1, 2)


def test_nobody_listens():
    with ReservedPorts(1) as ports, pytest.raises(ConnectionError, match="did not answer within"):
        is_lost = tf.Variable(False)
        SummationClient("worker 1", ports.addresses[0], PROOF, 0, RUN, is_lost, 1.0).join(0.5)


def test_the_credential_tells_clusters_apart(monkeypatch):
    monkeypatch.setenv("KERAS_HET_SERVICE_SECRET", "a secret of these tests")
    proofs = {summation_credential(2, 1), summation_credential(3, 1), summation_credential(2, 2)}
    assert len(proofs) == 3
    monkeypatch.delenv("KERAS_HET_SERVICE_SECRET")
    with pytest.raises(ValueError, match="needs one shared secret"):
        summation_credential(2, 1)


ENDS_WHILE_A_CALL_WAITS = """
import sys, threading
import tensorflow as tf
from keras_het.summation.group import SummationClient
from keras_het.summation.service import SummationService

address, proof, run = sys.argv[1], b"of this test", tf.constant(5, tf.int64)
service = SummationService(address, 2, proof, 2)
service.start()
client = SummationClient("worker 0", address, proof, 0, 5, tf.Variable(False), 60.0)
client.join(60.0)
exchange = (tf.constant(0), tf.constant(1, tf.int64), tf.ones([3]))
threading.Thread(target=client.exchange, args=exchange, daemon=True).start()
begun = service._table._begun
while not int(begun[0]):
    threading.Event().wait(0.01)
"""


@pytest.mark.full
def test_a_process_ends_while_a_worker_waits_for_another():
    with ReservedPorts(1) as ports:
        ports.release()
        command = [sys.executable, "-c", ENDS_WHILE_A_CALL_WAITS, ports.addresses[0]]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert ended.returncode == 0, ended.stderr[-2000:]
