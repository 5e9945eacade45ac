"""Links to the leader, measured by messages."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
from addresses import free_address

from keras_het.asynchronous.roles.role_choice import measure_link_rates
from keras_het.exchange.server import Server

NUM_WORKERS = 3


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


def test_all_are_told_the_same_and_the_leader_counts_as_the_fastest(logical_devices, monkeypatch):
    monkeypatch.setenv("KERAS_HET_SERVICE_SECRET", "a secret that only tests know")
    address, gatherer = free_address(), Gatherer()

    def work(worker):
        strategy = SimpleNamespace(
            num_workers=NUM_WORKERS,
            worker_index=worker,
            is_chief=worker == 0,
            extended=SimpleNamespace(gather_over_workers=gatherer.of(worker)),
            cluster_config=SimpleNamespace(service_address=lambda: address),
        )
        return measure_link_rates(strategy)

    with ThreadPoolExecutor(NUM_WORKERS) as pool:
        first, *others = pool.map(work, range(NUM_WORKERS))
    assert others == [first, first]
    leader, *rates = first
    assert leader == max(rates) and min(rates) > 0
    Server(address).close()  # the leader's port is free again
