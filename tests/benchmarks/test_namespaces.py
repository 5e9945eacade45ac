"""Hosts in network namespaces: separate networks, counted bytes, limited rates."""

import subprocess
import sys
import time

import pytest
from _namespaces import limited_hosts, why_not

SIZE = 2_000_000
RATE = 40.0
RECEIVE = """
import socket, sys
with socket.create_server((sys.argv[1], 7000)) as listening:
    print("ready", flush=True)
    connection, _ = listening.accept()
    left = int(sys.argv[2])
    while left:
        left -= len(connection.recv(1 << 16))
    connection.sendall(b"!")
    connection.recv(1)
"""
SEND = """
import socket, sys
connection = socket.create_connection((sys.argv[1], 7000))
connection.sendall(bytes(int(sys.argv[2])))
connection.recv(1)
"""

pytestmark = pytest.mark.network_namespaces


@pytest.fixture(scope="module", autouse=True)
def permitted():
    reason = why_not()
    if reason:
        pytest.skip(reason)


def start(hosts, index, program, *arguments):
    command = hosts.command(index, [sys.executable, "-c", program, *arguments])
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_bytes_are_counted_and_rates_limited():
    with limited_hosts([10 * RATE, RATE]) as hosts:
        receiver = start(hosts, 0, RECEIVE, hosts.address(0), str(SIZE))
        assert receiver.stdout.readline() == "ready\n"
        before = hosts.traffic()
        started = time.monotonic()
        assert start(hosts, 1, SEND, hosts.address(0), str(SIZE)).wait(60) == 0
        seconds = time.monotonic() - started
        assert receiver.wait(60) == 0
        (received, _), (_, sent) = [
            (now[0] - then[0], now[1] - then[1])
            for now, then in zip(hosts.traffic(), before, strict=True)
        ]
    # Frames of 1514 bytes carry 1448.
    assert SIZE * 1.03 < received < SIZE * 1.1
    assert sent == pytest.approx(received, rel=0.02)
    # A limit, which no machine is fast enough to break; 2 ms of it may come at once.
    assert seconds > (SIZE * 8 / 1e6) / RATE * 0.9


def test_a_host_is_out_of_reach_without_its_cable():
    with limited_hosts([RATE, RATE]) as hosts:
        hosts.set_link(0, up=False)
        ping = "import socket; socket.create_connection(('10.199.0.1', 7000), timeout={})"
        assert "TimeoutError" in start(hosts, 1, ping.format(0.5)).communicate(timeout=60)[1]
        hosts.set_link(0, up=True)
        hosts.set_rate(0, 2 * RATE)
        # Nobody listens there; on a busy machine the answer takes a while.
        ping = ping.format(30)
        assert "ConnectionRefusedError" in start(hosts, 1, ping).communicate(timeout=60)[1]


def test_nothing_is_left_behind():
    with limited_hosts([RATE]) as hosts:
        names = hosts.names
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert not any(name in left for name in names)
