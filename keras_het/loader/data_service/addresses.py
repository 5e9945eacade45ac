"""Addresses of dispatchers, and whether somebody answers there."""

from __future__ import annotations

import ipaddress
import socket


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port".

    Args:
        address: what the user gave; a protocol before it, as in "grpc://host:port", is left out.

    Raises:
        ValueError: if it is none.
    """
    host, separator, port = str(address).removeprefix("grpc://").rpartition(":")
    if not separator or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(
            f"Expected the address of a dispatcher as 'host:port'. Received: {address!r}. The "
            "process that called keras_het.loader.service() has it in `.address`."
        )
    return host, int(port)


def is_reachable(address: str, timeout: float) -> bool:
    """Whether a server answers at an address.

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
    """Raises where no dispatcher answers; TensorFlow would try again for an hour.

    Args:
        address: "host:port".
        timeout: how long to try, in seconds.

    Raises:
        ConnectionError: if nobody answers.
    """
    if not is_reachable(address, timeout):
        raise ConnectionError(
            f"No dispatcher of the tf.data service answers at {address} within {timeout:g} s. "
            "Start one with keras_het.loader.service(host=..., port=...) on that machine first, "
            "and see that its firewall lets the port through."
        )


def check_host(host: str) -> None:
    """Raises where consumers are to be sent to no machine in particular.

    Args:
        host: name or address under which others are to reach this machine.

    Raises:
        ValueError: if it stands for all interfaces: to whoever is told it, it is that one's own
            machine. It would look there for a worker, and wait for ever.
    """
    number = _number_of(host)
    if number is not None and number.is_unspecified:
        raise ValueError(
            "host is the name or address under which others reach this machine, one that means it "
            f"on theirs too. Received: {host!r}, which means all interfaces; servers listen on all "
            "of them whatever host is. Give one address, such as host='10.0.0.5'."
        )


def is_loopback(host: str) -> bool:
    """Whether a name or address is that of its own machine on every machine.

    Names are not looked up: Debian gives 127.0.1.1 to the machine's own name, which others know by
    another address.

    Args:
        host: name or address.
    """
    number = _number_of(host)
    return host.lower() == "localhost" if number is None else number.is_loopback


def _number_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that a text is, also in a short form such as "0"; None for a name."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, flags=socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        return None
    number = ipaddress.ip_address(str(found[0][4][0]).partition("%")[0])
    return getattr(number, "ipv4_mapped", None) or number
