"""Workers and the services of their machines; `tests/exchange/test_sums.py` has the sums."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from keras_het.exchange.secret import credential
from keras_het.launch.local.free_ports import ReservedPorts
from keras_het.strategy.cluster.cluster_config import ClusterConfig
from keras_het.summation import SummationService, start_machine, summation_credential
from keras_het.summation.group import SummationClient
from keras_het.summation.machine import tell_group_size

PROOF = credential(b"a secret of these tests", "summation")
NUM_WORKERS, RUN, TIMEOUT = 3, 77, 60.0


@pytest.fixture(scope="module")
def service():
    service = SummationService("127.0.0.1:0", NUM_WORKERS, PROOF)
    service.start()
    yield service
    service.close()


def client_of(address, worker, run, proof=PROOF, timeout=TIMEOUT):
    return SummationClient(f"worker {worker}", address, proof, worker, run, timeout)


def joined(address, num_workers, run, proof=PROOF, **options):
    clients = [client_of(address, worker, run, proof, **options) for worker in range(num_workers)]
    for client in clients:
        client.join(TIMEOUT)
    return clients


@pytest.fixture
def run():
    """A run of its own for each test: nothing is left of what another one did."""
    return int(np.random.default_rng().integers(1, 2**62))


@pytest.fixture
def clients(service, run):
    clients = joined(service.address, NUM_WORKERS, run)
    yield clients
    for client in clients:
        client.close()


def ones(clients, slot=0, step=1):
    return [client.contribute(slot, step, np.ones(1, np.float32)) for client in clients]


def numbers(futures):
    return [future.result(TIMEOUT).vectors[0].tolist() for future in futures]


def test_sums_are_those_of_the_workers_in_their_order(clients):
    random = np.random.default_rng(0)
    sizes = {0: 1, 1: 1000, 2: 33, 23: 70_000}
    for step in range(1, 6):
        values = {
            slot: random.normal(size=(NUM_WORKERS, size)).astype("float32") * 10.0**step
            for slot, size in sizes.items()
        }
        # In another order in each step.
        order = random.permutation([(w, slot) for w in range(NUM_WORKERS) for slot in sizes])
        answers = [
            (slot, clients[w].contribute(slot, step, values[slot][w])) for w, slot in order.tolist()
        ]
        for slot, answer in answers:
            expected = (values[slot][0] + values[slot][1]) + values[slot][2]
            np.testing.assert_array_equal(answer.result(TIMEOUT).vectors[0], expected)


def test_a_slow_worker_is_waited_for_beyond_the_time_out(service, run):
    clients = joined(service.address, NUM_WORKERS, run, timeout=0.1)
    waiting = ones(clients[:2])
    with pytest.raises(TimeoutError):
        waiting[0].result(1.5)
    assert numbers([*waiting, *ones(clients[2:])]) == [[3.0]] * 3


def test_contributions_of_this_process_need_no_message(service, clients, run):
    answers = ones(clients[1:])
    local = service.sums.contribute(run, 0, 0, 1, np.ones(1, np.float32))
    assert numbers([local, *answers]) == [[3.0]] * 3


def test_a_stranger_does_not_join(service):
    with pytest.raises(PermissionError, match="its shared secret or its TF_CONFIG"):
        client_of(service.address, 0, RUN, b"\0" * 32).join(TIMEOUT)


def test_nobody_listens():
    with ReservedPorts(1) as ports, pytest.raises(ConnectionError, match="did not answer within"):
        client_of(ports.addresses[0], 0, RUN).join(0.5)


def test_who_joins_notices_that_others_are_lost_meanwhile():
    class LostError(Exception):
        pass

    def check():
        raise LostError

    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = client_of(f"127.0.0.1:{silent.getsockname()[1]}", 0, RUN)
        with pytest.raises(LostError):
            client.join(TIMEOUT, check)
        assert not client.is_healthy(0.1)


def test_a_machine_that_is_there_is_healthy(clients):
    assert clients[0].is_healthy(TIMEOUT)


def test_a_service_that_ends_fails_what_waits_for_it(run):
    service = SummationService("127.0.0.1:0", 2, PROOF)
    service.start()
    client = client_of(service.address, 0, run)
    client.join(TIMEOUT)
    (waiting,) = ones([client])
    service.close()
    with pytest.raises(ConnectionError):
        waiting.result(TIMEOUT)
    client.close()


def test_the_credential_tells_clusters_apart(monkeypatch):
    monkeypatch.setenv("KERAS_HET_SERVICE_SECRET", "a secret of these tests")
    proofs = {summation_credential(2, 1), summation_credential(3, 1), summation_credential(2, 2)}
    assert len(proofs) == 3
    monkeypatch.delenv("KERAS_HET_SERVICE_SECRET")
    with pytest.raises(ValueError, match="needs one shared secret"):
        summation_credential(2, 1)


@pytest.fixture
def machine(monkeypatch):
    """A spare machine of three workers."""
    monkeypatch.setenv("KERAS_HET_SERVICE_SECRET", "a secret of these tests")
    with ReservedPorts(1) as ports:
        ports.release()
        workers, own = ("a:1", "b:1", "c:1"), ports.addresses
        config = ClusterConfig(None, workers, None, "summation", 0, summation_machines=own)
        service = start_machine(config)
        yield service
        service.close()


def test_a_smaller_group_tells_a_machine_its_number(machine, run, monkeypatch):
    three, two = (summation_credential(number, 1) for number in (3, 2))
    lost = joined(machine.address, 3, run, three)
    waiting = ones(lost[:1])
    with pytest.raises(PermissionError):
        client_of(machine.address, 0, run + 1, two).join(TIMEOUT)
    tell_group_size([machine.address], 3)  # as before: nobody is disturbed
    assert not waiting[0].done()
    tell_group_size([machine.address], 2)
    with pytest.raises(ConnectionError, match="has started again"):
        waiting[0].result(TIMEOUT)
    assert numbers(ones(joined(machine.address, 2, run + 1, two))) == [[2.0]] * 2
    with pytest.raises(ValueError, match="No number of workers"):
        tell_group_size([machine.address], 1)
    monkeypatch.setenv("KERAS_HET_SERVICE_SECRET", "another secret, 16 bytes")
    with pytest.raises(PermissionError, match="refused this group"):
        tell_group_size([machine.address], 3)


def test_many_workers_contribute_from_many_threads(clients):
    def run(worker, slot):
        return [
            numbers([clients[worker].contribute(slot, step, np.float32([10.0**worker]))])[0]
            for step in range(1, 11)
        ]

    with ThreadPoolExecutor(24) as pool:
        answers = [pool.submit(run, worker, slot) for slot in range(8) for worker in range(3)]
        assert all(answer.result(TIMEOUT) == [[111.0]] * 10 for answer in answers)
    assert threading.active_count() < 60
