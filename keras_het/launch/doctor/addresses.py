"""What the network says of an address of TF_CONFIG."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
from collections.abc import Sequence

import psutil

from keras_het.strategy.cluster.arrival import places_of

_INTERNET = (socket.AF_INET, socket.AF_INET6)
LISTENS, REFUSED, UNREACHABLE, UNKNOWN = "listens", "refused", "unreachable", "unknown"


HOW_TO_CLOSE = (
    "Block their ports with a firewall, or start them in their own network namespace "
    "(keras-het run --help)."
)


def public_addresses() -> tuple[str, ...]:
    found = [each for interface in psutil.net_if_addrs().values() for each in interface]
    texts = [each.address.partition("%")[0] for each in found if each.family in _INTERNET]
    return tuple(text for text in texts if ipaddress.ip_address(text).is_global)


def open_to(public: Sequence[str]) -> str:
    return (
        "TensorFlow's servers listen on every interface of this machine, also on "
        f"{', '.join(public)}. Anyone who can reach a worker's port can read and write files."
    )


def is_loopback(address: str) -> bool:
    places = places_of(address)
    hosts = [ipaddress.ip_address(place[0].partition("%")[0]) for _, place in places]
    return bool(hosts) and all(host.is_loopback for host in hosts)


def bind_problem(address: str) -> int:
    """Try to listen on an address for a moment; return the number of the error, 0 if it can be."""
    last = errno.EADDRNOTAVAIL
    for family, place in places_of(address):
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # as servers do: connections of an earlier one that are still closing do not count
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(place)
                probe.listen()
            except OSError as error:
                last = error.errno or errno.EADDRNOTAVAIL
                if last == errno.EADDRINUSE:
                    return last
            else:
                return 0
    return last


def holder_of(port: int) -> str:
    """Return the program that listens on a port of this machine, empty if it is hidden."""
    with contextlib.suppress(psutil.Error, OSError, RuntimeError):
        for each in psutil.net_connections("tcp"):
            is_it = each.laddr and each.laddr.port == port and each.status == psutil.CONN_LISTEN
            if is_it and each.pid:
                return f"{psutil.Process(each.pid).name()} (process {each.pid})"
    return ""


def reach(address: str, timeout_seconds: float = 2.0) -> str:
    """Connect to an address; return what happened."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout_seconds).close()
    except socket.gaierror:
        return UNKNOWN
    except ConnectionRefusedError:
        return REFUSED
    except OSError:
        return UNREACHABLE
    return LISTENS
