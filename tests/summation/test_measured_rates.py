"""Rates of links from speeds of pairs: the slower link of two tells."""

import threading

import numpy as np
import pytest

from keras_het.exchange.links import LinkSpeed
from keras_het.summation import group


@pytest.mark.parametrize(
    ("rates", "num_spare", "expected"),
    [
        ([4.0, 4.0, 2.0], 0, [4.0, 4.0, 2.0]),
        ([1.0, 4.0, 4.0], 0, [1.0, 4.0, 4.0]),  # the first one's is slow
        ([4.0, 1.0, 3.0, 8.0], 1, [4.0, 1.0, 3.0, 4.0]),  # nobody shows how fast the fastest is
        ([4.0, 2.0], 0, [2.0, 2.0]),
        ([3.5, 4.0, 4.0, 2.9], 1, [4.0, 4.0, 4.0, 2.9]),  # nearly as fast counts as fast
    ],
)
def test_all_members_find_the_same_rates(monkeypatch, rates, num_spare, expected):
    members, machines = list(range(len(rates) - num_spare)), [str(i) for i in range(len(rates))]
    barrier, rows = threading.Barrier(len(members), timeout=30), {}

    class Link:
        def __init__(self, address, service, proof, worker):
            self.speed = min(rates[int(address)], rates[worker])

        def close(self):
            pass

    monkeypatch.setattr(group, "Client", Link)
    monkeypatch.setattr(
        group, "measure_link", lambda probe: LinkSpeed(0.0, probe.args[0].speed), raising=True
    )

    def run(worker):
        def gather(value):
            rows[worker] = value.reshape(1, -1)
            barrier.wait()
            found = np.concatenate([rows[member] for member in members])
            barrier.wait()
            return found

        results[worker] = group._measured_rates(machines, members, worker, b"", gather)

    results = {}
    threads = [threading.Thread(target=run, args=(member,), daemon=True) for member in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == dict.fromkeys(members, expected)
