"""The speed of a link, by messages there and back."""

import pytest

from keras_het.exchange.client import Client
from keras_het.exchange.links import PROBES, measure_link, send_probe, serve_probes
from keras_het.exchange.server import Server

LATENCY, RATE = 0.25, 2.0**20


@pytest.mark.parametrize("comes_back", [False, True])
def test_latency_and_rate_without_the_first_messages(comes_back):
    now, seen = 0.0, set()

    def exchange(message):
        nonlocal now
        size = len(message)
        now += 0.0 if size in seen else 1000.0  # connecting, tracing
        seen.add(size)
        now += 2 * LATENCY + (1 + comes_back) * 4 * size / RATE

    latency, rate = measure_link(exchange, comes_back, lambda: now)
    assert rate == pytest.approx(RATE)
    assert latency == pytest.approx(LATENCY, rel=0.01)


def test_other_traffic_does_not_count():
    now = 0.0
    waits = iter([0, 5, 0.1, 5, 5, 5, 0, 1.1, 1.1, 9, 1.1, 9])

    def exchange(message):
        nonlocal now
        now += next(waits)

    latency, rate = measure_link(exchange, clock=lambda: now)
    assert latency == pytest.approx(0.15 / 2)
    assert rate == pytest.approx(4 * (2**18 - 256) / (1.1 - 0.15))


def test_probes_are_taken_from_those_with_the_secret():
    server = Server("127.0.0.1:0")
    serve_probes(server, b"secret")
    server.start()
    friend, stranger = (Client(server.address, PROBES, key) for key in (b"secret", b"another"))
    try:
        latency, rate = measure_link(lambda vector: send_probe(friend, vector))
        assert 0 < latency < 60 and rate > 0
        with pytest.raises(PermissionError, match="shared secret"):
            measure_link(lambda vector: send_probe(stranger, vector))
    finally:
        friend.close()
        stranger.close()
        server.close()
