"""Workers and the services of their machines; `test_sums.py` has the sums."""

import socket

import numpy as np
import pytest

from keras_het.exchange.secret import credential
from keras_het.launch.local.free_ports import ReservedPorts
from keras_het.strategy.cluster.cluster_config import ClusterConfig
from keras_het.summation.group import SummationClient
from keras_het.summation.machine import (
    SummationService,
    start_machine,
    summation_credential,
    tell_group_size,
)

PROOF = credential(b"a secret of these tests", "summation")
NUM_WORKERS, RUN, TIMEOUT = 3, 77, 60.0


@pytest.fixture
def service():
    service = SummationService("127.0.0.1:0", NUM_WORKERS, PROOF)
    service.start()
    yield service
    service.close()


def client_of(address, worker, run=RUN, proof=PROOF, timeout=TIMEOUT):
    return SummationClient(f"worker {worker}", address, proof, worker, run, timeout)


def joined(address, num_workers, run=RUN, proof=PROOF, **options):
    clients = [client_of(address, worker, run, proof, **options) for worker in range(num_workers)]
    for client in clients:
        client.join(TIMEOUT)
    return clients


@pytest.fixture
def clients(service):
    clients = joined(service.address, NUM_WORKERS)
    yield clients
    for client in clients:
        client.close()


def ones(clients, slot=0, step=1):
    return [client.contribute(slot, step, np.ones(1, np.float32)) for client in clients]


def numbers(futures):
    return [future.result(TIMEOUT).vectors[0].tolist() for future in futures]


def test_a_slow_worker_is_waited_for_beyond_the_time_out(service):
    *fast, slow = joined(service.address, NUM_WORKERS, timeout=0.1)
    waiting = ones(fast)
    with pytest.raises(TimeoutError):
        waiting[0].result(1.5)
    assert numbers([*waiting, *ones([slow])]) == [[3.0]] * 3


def test_who_cannot_join(service):
    with pytest.raises(PermissionError, match="its shared secret or its TF_CONFIG"):
        client_of(service.address, 0, proof=b"\0" * 32).join(TIMEOUT)
    with ReservedPorts(1) as ports, pytest.raises(ConnectionError, match="did not answer within"):
        client_of(ports.addresses[0], 0).join(0.5)


def test_who_joins_notices_that_others_are_lost_meanwhile(clients):
    class LostError(Exception):
        pass

    def check():
        raise LostError

    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = client_of(f"127.0.0.1:{silent.getsockname()[1]}", 0)
        with pytest.raises(LostError):
            client.join(TIMEOUT, check)
        assert not client.is_healthy(0.1)
    assert clients[0].is_healthy(TIMEOUT)


def test_a_service_that_ends_fails_what_waits_for_it(service, clients):
    (waiting,) = ones(clients[:1])
    service.close()
    with pytest.raises(ConnectionError):
        waiting.result(TIMEOUT)


@pytest.fixture
def secret(monkeypatch):
    monkeypatch.setenv("KERAS_HET_SECRET", "a secret of these tests")


def test_the_credential_tells_clusters_apart(secret, monkeypatch):
    proofs = {summation_credential(2, 1), summation_credential(3, 1), summation_credential(2, 2)}
    assert len(proofs) == 3
    monkeypatch.delenv("KERAS_HET_SECRET")
    with pytest.raises(ValueError, match="needs one shared secret"):
        summation_credential(2, 1)


@pytest.fixture
def machine(secret):
    with ReservedPorts(1) as ports:
        ports.release()
        workers, own = ("a:1", "b:1", "c:1"), ports.addresses
        config = ClusterConfig(None, workers, None, "summation", 0, summation_machines=own)
        service = start_machine(config)
        yield service
        service.close()


def test_a_smaller_group_tells_a_machine_its_number(machine, monkeypatch):
    three, two = (summation_credential(number, 1) for number in (3, 2))
    waiting = ones(joined(machine.address, 3, RUN, three)[:1])
    with pytest.raises(PermissionError):
        client_of(machine.address, 0, RUN + 1, two).join(TIMEOUT)
    tell_group_size([machine.address], 3)  # as before: nobody is disturbed
    assert not waiting[0].done()
    tell_group_size([machine.address], 2)
    with pytest.raises(ConnectionError, match="has started again"):
        waiting[0].result(TIMEOUT)
    assert numbers(ones(joined(machine.address, 2, RUN + 1, two))) == [[2.0]] * 2
    with pytest.raises(ValueError, match="No number of workers"):
        tell_group_size([machine.address], 1)
    monkeypatch.setenv("KERAS_HET_SECRET", "another secret, 16 bytes")
    with pytest.raises(PermissionError, match="refused this group"):
        tell_group_size([machine.address], 3)
