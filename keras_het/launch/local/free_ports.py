"""Free ports of this machine, reserved until the workers bind them."""

import secrets
import socket
from pathlib import Path

HOST = "127.0.0.1"

_LOWEST_PORT = 10_000
_ATTEMPTS_PER_PORT = 200
_EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


class ReservedPorts:
    """Distinct free TCP ports on 127.0.0.1."""

    # Each is held on TCP until `release`, and on UDP until `close`, as a lock: clusters that start
    # at the same time never get the same port, nor one that the system gives to connections.

    def __init__(self, count: int) -> None:
        self._tcp: list[socket.socket] = []
        self._udp: list[socket.socket] = []
        try:
            for _ in range(count):
                self._reserve_one()
        except BaseException:
            self.close()
            raise
        self.ports = tuple(each.getsockname()[1] for each in self._tcp)

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(f"{HOST}:{port}" for port in self.ports)

    def release(self) -> None:
        """Free the TCP ports for the workers; call it just before they start."""
        while self._tcp:
            self._tcp.pop().close()

    def close(self) -> None:
        """Return everything; call it when the workers are gone."""
        self.release()
        while self._udp:
            self._udp.pop().close()

    def __enter__(self) -> "ReservedPorts":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _reserve_one(self) -> None:
        for _ in range(_ATTEMPTS_PER_PORT):
            tcp, udp = socket.socket(), socket.socket(type=socket.SOCK_DGRAM)
            try:
                tcp.bind((HOST, _candidate()))
                udp.bind(tcp.getsockname())
            except OSError:
                tcp.close()
                udp.close()
            else:
                self._tcp.append(tcp)
                self._udp.append(udp)
                return
        raise OSError(
            f"No free port found on {HOST} in {_ATTEMPTS_PER_PORT} attempts. End other clusters on "
            "this machine."
        )


def _candidate() -> int:
    """Return a random port below the ephemeral range, or 0 (any) if the range is unknown."""
    try:
        end = int(_EPHEMERAL_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0
    if end <= 2 * _LOWEST_PORT:
        return 0
    return _LOWEST_PORT + secrets.randbelow(end - _LOWEST_PORT)
