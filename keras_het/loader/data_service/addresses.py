"""Addresses of dispatchers, and whether somebody answers there."""

from __future__ import annotations

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
