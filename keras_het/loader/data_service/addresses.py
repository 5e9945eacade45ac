"""Addresses of dispatchers, and checks that they answer."""

from __future__ import annotations

import ipaddress
import socket


def split_address(address: str) -> tuple[str, int]:
    """Split "host:port" into host and port.

    Args:
        address: the user's value; a protocol before it, as in "grpc://host:port", is ignored.

    Raises:
        ValueError: if it is not an address.
    """
    host, separator, port = str(address).removeprefix("grpc://").rpartition(":")
    if not separator or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(
            f"Expected the address of a dispatcher as 'host:port'. Received: {address!r}. The "
            "process that called keras_het.loader.service() has it in `.address`."
        )
    return host, int(port)


def is_reachable(address: str, timeout: float) -> bool:
    """Tell whether a server answers at an address.

    Args:
        address: "host:port".
        timeout: how long to try, in seconds.
    """
    try:
        with socket.create_connection(split_address(address), timeout):
            return True
    except OSError:
        return False


def check_reachable(address: str, timeout: float) -> None:
    """Raise an error if no dispatcher answers; TensorFlow would retry for an hour.

    Args:
        address: "host:port".
        timeout: how long to try, in seconds.

    Raises:
        ConnectionError: if no server answers.
    """
    if not is_reachable(address, timeout):
        raise ConnectionError(
            f"No dispatcher of the tf.data service answers at {address} within {timeout:g} s. "
            "Start one with keras_het.loader.service(host=..., port=...) on that machine first, "
            "and see that its firewall lets the port through."
        )


def check_host(host: str) -> None:
    """Raise an error if consumers would be sent to no machine in particular.

    Args:
        host: name or address under which others should reach this machine.

    Raises:
        ValueError: if it stands for all interfaces: each machine that is given it takes it for
            itself. It would look for a worker there, and wait forever.
    """
    number = _number_of(host)
    if number is not None and number.is_unspecified:
        raise ValueError(
            "host is the name or address under which others reach this machine, one that means it "
            f"on theirs too. Received: {host!r}, which means all interfaces; servers listen on all "
            "of them whatever host is. Give one address, such as host='10.0.0.5'."
        )


def is_loopback(host: str) -> bool:
    """Tell whether a name or address denotes the local machine on every machine.

    Names are not resolved: Debian assigns 127.0.1.1 to the machine's own name, which others know by
    a different address.

    Args:
        host: name or address.
    """
    number = _number_of(host)
    return host.lower() == "localhost" if number is None else number.is_loopback


def _number_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Parse an address, also in a short form such as "0"; None for a name."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, flags=socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        return None
    number = ipaddress.ip_address(str(found[0][4][0]).partition("%")[0])
    return getattr(number, "ipv4_mapped", None) or number
