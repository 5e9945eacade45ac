"""The speed of a link, by messages there and back."""

import pytest
import tensorflow as tf
from addresses import free_address

from keras_het.rpc.admission import Gate
from keras_het.rpc.channel import FunctionClient
from keras_het.rpc.links import measure_link, send_message, serve_messages
from keras_het.rpc.server import FunctionServer

LATENCY, RATE = 0.25, 2.0**20


@pytest.mark.parametrize("comes_back", [False, True])
def test_latency_and_rate_without_the_first_messages(comes_back):
    now, seen = 0.0, set()

    def exchange(message):
        nonlocal now
        size = int(tf.size(message))
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


def test_messages_are_taken_from_those_with_the_secret(logical_devices):
    server = FunctionServer(free_address())
    serve_messages(server, Gate(b"secret"))
    server.start()
    try:
        client = FunctionClient(server.address, b"secret", 60.0)
        latency, rate = measure_link(lambda message: send_message(client, message))
        assert 0 < latency < 60 and rate > 0
        with pytest.raises(PermissionError, match="its shared secret differs"):
            send_message(FunctionClient(server.address, b"another", 60.0), tf.zeros([1]))
    finally:
        server.close()
