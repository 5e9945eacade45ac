"""Format of a worker's address, and a search for a free one. Standard library only."""

import socket

GREETING = b"keras_het waits\n"
"""Sent at once by a worker that waits for its peers; TensorFlow's server sends something else."""
_GREETING_SECONDS = 0.5
_MAXIMUM_PORT = 65535


def check_address(address: object, where: str) -> str:
    if not isinstance(address, str):
        raise _address_error(address, where, "it is not a string")
    if "://" in address:
        raise _address_error(address, where, "it has a scheme; leave out everything up to '://'")
    if address != "".join(address.split()):
        raise _address_error(address, where, "it contains white space")
    host, separator, port = address.rpartition(":")
    if not separator or not port or address.endswith("]"):
        raise _address_error(address, where, "it has no port; add one, for example ':12345'")
    if not host:
        raise _address_error(address, where, "it has no host; add a name or an IP address")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise _address_error(address, where, "an IPv6 host needs brackets, '[::1]:12345'")
    _check_port(port, address, where)
    return address


def _check_port(port: str, address: str, where: str) -> None:
    if not (port.isascii() and port.isdigit()):
        raise _address_error(address, where, f"its port {port!r} is not a number")
    if not 1 <= int(port) <= _MAXIMUM_PORT:
        raise _address_error(
            address, where, f"its port {port} is out of range, expected 1 to {_MAXIMUM_PORT}"
        )


def _address_error(address: object, where: str, problem: str) -> ValueError:
    return ValueError(
        f"{where} has a bad address: {problem}. Received: {address!r}; expected 'host:port' as in "
        "'host-a:12345'."
    )


def places_of(address: str) -> list[tuple[socket.AddressFamily, tuple[str, int]]]:
    """Resolve `host:port` to socket addresses; empty while the host's name is unknown."""
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError:
        return []
    places = [(family, (str(place[0]), int(place[1]))) for family, _, _, _, place in found]
    return list(dict.fromkeys(places))


def has_left(address: str, timeout_seconds: float = 1.0) -> bool:
    """Tell whether the process that listened at an address has ended; its host answers."""
    # Nothing listens there any more, or a worker of another start, which waits for its peers.
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout_seconds) as place:
            place.settimeout(_GREETING_SECONDS)
            return place.recv(len(GREETING)) == GREETING
    except ConnectionRefusedError:
        return True
    except OSError:
        return False


def free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host.strip("[]"), 0))
        except OSError as error:
            raise OSError(
                f"A service cannot listen on {host!r}, this worker's host in TF_CONFIG: {error}. "
                "Give the address by which the others reach this machine."
            ) from error
        return int(probe.getsockname()[1])
