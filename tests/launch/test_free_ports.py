import socket
from pathlib import Path

import pytest

from keras_het.launch.local import free_ports
from keras_het.launch.local.free_ports import ReservedPorts


def bind(port: int) -> None:
    with socket.socket() as own:
        own.bind(("127.0.0.1", port))


def test_ports_are_distinct_and_held_until_released() -> None:
    with ReservedPorts(20) as reserved:
        assert len(set(reserved.ports)) == 20
        assert reserved.addresses == tuple(f"127.0.0.1:{port}" for port in reserved.ports)
        with pytest.raises(OSError, match="in use"):
            bind(reserved.ports[0])
        reserved.release()
        for port in reserved.ports:
            bind(port)


def test_two_clusters_never_share_a_port_even_after_release(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with ReservedPorts(1) as first:
        first.release()
        taken = first.ports[0]
        with ReservedPorts(1) as spare:
            free = spare.ports[0]
        candidates = iter([taken, taken, free])
        monkeypatch.setattr(free_ports, "_candidate", lambda: next(candidates))
        with ReservedPorts(1) as second:
            assert second.ports == (free,)


def test_gives_everything_back_when_there_are_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    with ReservedPorts(1) as spare:
        only = spare.ports[0]
    monkeypatch.setattr(free_ports, "_candidate", lambda: only)
    with pytest.raises(OSError, match="No free port found"):
        ReservedPorts(2)
    bind(only)


def test_ports_are_outside_the_range_of_outgoing_connections() -> None:
    try:
        lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        pytest.skip("this system does not say which ports it deals out")
    if lowest <= 20_000:
        pytest.skip("this system leaves too few ports below that range")
    with ReservedPorts(10) as reserved:
        assert all(10_000 <= port < lowest for port in reserved.ports)


def test_refuses_no_port() -> None:
    with pytest.raises(ValueError, match=r"at least 1\. Received: count=0"):
        ReservedPorts(0)
