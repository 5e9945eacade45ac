"""Addresses for servers that tests start."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

from keras_het.launch.local.free_ports import ReservedPorts

_held: list[ReservedPorts] = []


def free_address() -> str:
    """An address of this host, "host:port", that no other test run is given either."""
    ports = ReservedPorts(1)
    ports.release()
    _held.append(ports)
    return ports.addresses[0]


@contextlib.contextmanager
def silent_address() -> Iterator[str]:
    """An address that takes connections and never answers, as a stopped process does."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
