"""Links to the leader, measured by messages: one worker at a time, without the first message."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from addresses import free_address

from keras_het.asynchronous.parameter_service import credential
from keras_het.asynchronous.roles import role_measurements

SECRET = "a secret that only tests know"
NUM_WORKERS = 3
SECONDS = {1: 0.5, 2: 0.25}


class Gatherer:
    """What `gather_over_workers` does, for workers in threads."""

    def __init__(self):
        self.barrier = threading.Barrier(NUM_WORKERS, timeout=60)
        self.given = [None] * NUM_WORKERS

    def of(self, worker):
        def gather(value):
            self.given[worker] = value
            self.barrier.wait()
            everyone = np.concatenate(self.given)
            self.barrier.wait()
            return everyone

        return gather


def strategy_of(worker, gatherer):
    return SimpleNamespace(
        num_workers=NUM_WORKERS,
        worker_index=worker,
        is_chief=worker == 0,
        extended=SimpleNamespace(gather_over_workers=gatherer.of(worker)),
        cluster_config=SimpleNamespace(service_address=lambda: "leader:1"),
    )


def test_each_worker_measures_alone_and_the_leader_counts_as_the_fastest(monkeypatch):
    monkeypatch.setenv("KERAS_HET_SERVICE_SECRET", SECRET)
    events, gatherer = [], Gatherer()
    server = SimpleNamespace(close=lambda: events.append("close"))
    monkeypatch.setattr(role_measurements, "_start_server", lambda address, proof: server)
    workers = threading.local()

    def measure(address, proof):
        events.append(f"begin {workers.index}")
        events.append(f"end {workers.index}")
        return SECONDS[workers.index]

    def work(worker):
        workers.index = worker
        return role_measurements.measure_link_rates(strategy_of(worker, gatherer))

    monkeypatch.setattr(role_measurements, "_measure", measure)
    with ThreadPoolExecutor(NUM_WORKERS) as pool:
        found = list(pool.map(work, range(NUM_WORKERS)))
    megabyte = 1 << 20
    assert found == [(4 * megabyte, 2 * megabyte, 4 * megabyte)] * NUM_WORKERS
    assert events == ["begin 1", "end 1", "begin 2", "end 2", "close"]


@pytest.fixture
def leader(logical_devices):
    address = free_address()
    server = role_measurements._start_server(address, credential(SECRET.encode(), "links"))
    yield address
    server.close()


def test_the_first_message_does_not_count(leader, monkeypatch):
    times = iter([0.0, 100.0, 200.0, 201.0, 300.0, 305.0, 400.0, 402.0])
    clock = SimpleNamespace(perf_counter=lambda: next(times))
    monkeypatch.setattr(role_measurements, "time", clock)
    assert role_measurements._measure(leader, credential(SECRET.encode(), "links")) == 2.0


def test_another_secret_is_refused(leader):
    with pytest.raises(PermissionError, match="its shared secret differs"):
        role_measurements._measure(leader, credential(b"another secret, as long", "links"))
