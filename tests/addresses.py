"""Addresses for servers that tests start."""

from __future__ import annotations

from keras_het.launch.free_ports import ReservedPorts

_held: list[ReservedPorts] = []


def free_address() -> str:
    """An address of this host, "host:port", that no other test run is given either."""
    ports = ReservedPorts(1)
    ports.release()
    _held.append(ports)
    return ports.addresses[0]
