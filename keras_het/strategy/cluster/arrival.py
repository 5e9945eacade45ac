"""A wait for the other workers, ahead of TensorFlow's, which is silent and cannot be stopped.

A waiting worker listens where TensorFlow will, and greets who connects: a peer of an earlier start
learns that the process before is gone. One moves on after it has seen all others: a worker whose
TensorFlow answers before this one listens is a rest of an earlier start, until the connection to it
ends, as it does with its process. Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Self

_logger = logging.getLogger(__name__)

GREETING = b"keras_het waits\n"
"""Sent at once by a worker that waits for its peers; TensorFlow's server sends something else."""
_GREETING_SECONDS = 0.5

_FIRST_MESSAGE_SECONDS = 10.0
_SECONDS_BETWEEN_ROUNDS = 0.2
_ANSWER_SECONDS = 2.0
# TensorFlow's server speaks first, in milliseconds; a worker that waits only greets.
_FIRST_ANSWER_SECONDS = 0.5
# After the end of those who were still running from an earlier start.
_SECONDS_TO_RESTART = 10.0
_AT_ONCE = 64
_SECONDS_TO_END = 5.0
_MOST_NAMES = 8
_QUEUE = 1024


class PortInUseError(RuntimeError):
    """Another program has taken the port at which this worker is to be reached."""


def wait_for_peers(
    own_address: str, peers: Mapping[str, str], startup_timeout_seconds: float, listens: bool = True
) -> float:
    """Wait until every other worker has reached the same point."""
    missing, began, next_message = dict(peers), time.monotonic(), _FIRST_MESSAGE_SECONDS
    earlier = _EarlierPeers(missing.values() if listens else ())
    old = {name: at for name, at in missing.items() if at in earlier.connections}
    if old:
        _logger.warning(
            "Waiting for %s: still running from an earlier start. Workers start together: restart "
            "those too, or see that they end.",
            _names(old),
        )
    last_seen = 0.0
    with (
        earlier,
        _listening(own_address) if listens else contextlib.nullcontext() as listener,
    ):
        while True:
            if ended := earlier.take_ended():
                names = {name: at for name, at in old.items() if at in ended}
                _logger.warning("%s of an earlier start has ended.", _names(names))
            here = _accepting(missing.values()) - earlier.connections.keys()
            missing = {name: at for name, at in missing.items() if at not in here}
            waited = time.monotonic() - began
            if not missing:
                return max(0.0, startup_timeout_seconds - waited)
            last_seen = waited if earlier.connections else last_seen
            # where one has come again, all are restarted, one after the other
            is_alone = bool(old) and not earlier.connections and old.keys() <= missing.keys()
            if is_alone and last_seen + _SECONDS_TO_RESTART <= min(waited, startup_timeout_seconds):
                raise TimeoutError(
                    f"{_names(old)} belonged to an earlier start, which has ended, and did not "
                    f"restart within {_SECONDS_TO_RESTART:g} s: this worker was restarted "
                    "alone. Restart all workers together; with "
                    "keras_het.callbacks.BackupAndRestore training continues where it was saved."
                )
            if waited >= startup_timeout_seconds:
                still = f"{_names(old)} still runs from an earlier start: end it. "
                still = still if earlier.connections else ""
                raise TimeoutError(
                    f"{_names(missing)} did not start within startup_timeout_seconds="
                    f"{startup_timeout_seconds:g}. {still}Check that the "
                    "process runs there, that TF_CONFIG is the same on all workers but for the "
                    "index, and that no firewall closes the port."
                )
            if waited >= next_message:
                _logger.warning("Waiting for %s, %.0f s ...", _names(missing), waited)
                next_message += _FIRST_MESSAGE_SECONDS
            _greet(
                listener, min(_SECONDS_BETWEEN_ROUNDS, max(0.0, startup_timeout_seconds - waited))
            )


def _greet(listener: socket.socket | None, seconds: float) -> None:
    """Let some time pass, and greet who connects meanwhile."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if listener is None:
            return time.sleep(left)
        listener.settimeout(left)
        with contextlib.suppress(OSError):  # nobody came, or has gone again
            visitor, _ = listener.accept()
            with visitor:
                visitor.send(GREETING)


def _names(missing: Mapping[str, str]) -> str:
    names = [f"{name} ({address})" for name, address in missing.items()]
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


@contextlib.contextmanager
def _listening(address: str) -> Iterator[socket.socket | None]:
    with contextlib.ExitStack() as open_sockets:
        bound = None
        for family, place in places_of(address)[:1]:
            listener = open_sockets.enter_context(socket.socket(family, socket.SOCK_STREAM))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # This host's name need not be that of an interface: TensorFlow listens on all.
            every = "::" if family == socket.AF_INET6 else ""
            is_loopback = place[0].startswith("127.") or place[0] == "::1"
            try:
                _bind(listener, (place[0] if is_loopback else every, place[1]), address)
                listener.listen(_QUEUE)
                bound = listener
            except OSError as error:  # TensorFlow's server says what is wrong with it
                _logger.info("Not listening at %s: %s", address, error)
        yield bound


def _bind(listener: socket.socket, place: tuple[str, int], address: str) -> None:
    """Bind a socket; one that belongs to a program that is just ending may still be in use."""
    end = time.monotonic() + _SECONDS_TO_END
    while True:
        try:
            return listener.bind(place)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            if time.monotonic() >= end:
                raise PortInUseError(
                    f"This worker cannot listen at {address}, its address in TF_CONFIG: another "
                    "program on this machine uses the port. Perhaps a second worker has the same "
                    "index, or a worker of an earlier run has not ended. End it, or give this "
                    "worker another index or port."
                ) from None
            time.sleep(_SECONDS_BETWEEN_ROUNDS)


class _EarlierPeers:
    """Peers that are still running from an earlier start, each with a connection to its process."""

    def __init__(self, addresses: Iterable[str]) -> None:
        self.connections = _connect(addresses, _FIRST_ANSWER_SECONDS, speaking=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        _close(self.connections.values())

    def take_ended(self) -> set[str]:
        # A successor may answer already, but the connection to the process before has ended. A new
        # one each time, made while the last was open: gRPC ends those on which nothing arrives.
        before, self.connections = self.connections, _connect(self.connections)
        ended = {
            at for at, last in before.items() if at not in self.connections or _has_ended(last)
        }
        _close(before.values())
        _close(self.connections.pop(at) for at in ended & self.connections.keys())
        return ended


def _has_ended(connection: socket.socket) -> bool:
    try:
        while connection.recv(4096):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _close(connections: Iterable[socket.socket]) -> None:
    for connection in connections:
        connection.close()


def _accepting(addresses: Iterable[str]) -> set[str]:
    connections = _connect(addresses)
    _close(connections.values())
    return set(connections)


def _connect(
    addresses: Iterable[str], seconds: float = _ANSWER_SECONDS, speaking: bool = False
) -> dict[str, socket.socket]:
    """Connect to those that accept; if asked, only to those with TensorFlow's server."""
    waiting = list(addresses)
    connect = functools.partial(_connect_to, seconds=seconds, speaking=speaking)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        found = dict(zip(waiting, pool.map(connect, waiting), strict=True))
    return {address: connection for address, connection in found.items() if connection is not None}


def _connect_to(address: str, seconds: float, speaking: bool) -> socket.socket | None:
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        place = host.strip("[]"), int(port)
        attempt = stack.enter_context(socket.create_connection(place, seconds))
        says = attempt.recv(len(GREETING)) if speaking else None
        if _is_connected(attempt) and says not in (b"", GREETING):
            attempt.setblocking(False)
            stack.pop_all()
            return attempt
    return None


def _is_connected(attempt: socket.socket) -> bool:
    if attempt.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        return False
    with contextlib.suppress(OSError):  # the other side has reset the connection since
        # A port of this machine without a listener may be given to the connection attempt itself.
        return bool(attempt.getsockname() != attempt.getpeername())
    return False


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
